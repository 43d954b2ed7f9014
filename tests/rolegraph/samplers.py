"""A sampler and reward roles without models, and a whole sampling run of them.

What a candidate says follows from the seed, its row's uid and its repeat; what it scores follows from what it says.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from rolegraph.algorithms.sampling import Sampling
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.algorithms.scorers import Scorers
from rolegraph.batch import Batch
from rolegraph.config.schema import RootConfig, RunConfig, Spec
from rolegraph.data import Dataset
from rolegraph.data.report import Report
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.interfaces import ORMRole, PRMRole, SamplerRole, SamplingParams, StepReduce
from rolegraph.placement import PlacementConfig, Plan, Slot
from rolegraph.role import Mesh, Role, is_scorer
from rolegraph.run import Run
from rolegraph.telemetry import Telemetry
from rolegraph.turns import TurnTaker, turns_of


def number(*parts: object) -> int:
    """A number from 0 to 999 that these name."""
    return int(hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest(), 16) % 1000


class StubSampler(SamplerRole):
    """Says a number. `config`: seconds a call takes, uids that fail, and uids whose response is empty."""

    queue_rows = 4
    queue_in_flight = 2

    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        settings: Mapping[str, Any] = self.config or {}
        time.sleep(settings.get("seconds", 0.0))
        uids = batch["uid"].to_pylist()
        wanted = batch["repeats"].to_pylist() if "repeats" in batch else [range(sampling.n)] * len(batch)
        which = [(row, repeat) for row, repeats in enumerate(wanted) for repeat in repeats]
        texts = [self.say(uids[row], repeat, sampling) for row, repeat in which]
        reasons = ["the service said no" if text is None else None for text in texts]
        return (
            batch.drop(["repeats"])
            .take([row for row, _ in which])
            .with_columns(
                {
                    "repeat": np.array([repeat for _, repeat in which], np.int32),
                    "step": np.full(len(which), sampling.step, np.int32),
                    "response_text": pa.array(texts, pa.string()),
                    "finish_reason": ["stop" if text is not None else "error" for text in texts],
                    "response_length": pa.array([None if t is None else len(t) for t in texts], pa.int32()),
                    "sample_fault": pa.array(reasons, pa.string()),
                }
            )
        )

    def say(self, uid: str, repeat: int, sampling: SamplingParams) -> str | None:
        """The response of a candidate."""
        settings: Mapping[str, Any] = self.config or {}
        if uid in settings.get("fails", ()):
            return None
        if uid in settings.get("empty", ()):
            return " "
        return f"{number((sampling.seed or 0) + sampling.step, uid, repeat)}"


class StubORM(ORMRole):
    """1 where the number is even, null where it divides by 7. `config`: seconds a call takes."""

    queue_rows = 8

    def score(self, batch: Batch) -> Batch:
        time.sleep(self.config or 0.0)
        said = [int(text) for text in batch["response_text"].to_pylist()]
        rewards = [None if value % 7 == 0 else float(value % 2 == 0) for value in said]
        return batch.with_columns(
            {
                "rewards/even": pa.array(rewards, pa.float64()),
                "reward_faults/even": pa.array([1 if reward is None else 0 for reward in rewards], pa.int8()),
                "reward": pa.array(rewards, pa.float64()),
                "reward_faults": pa.array([reward is None for reward in rewards]).cast(pa.int32()),
                "reward_reasons": ["even: 7" if reward is None else None for reward in rewards],
            }
        )


class StubPRM(PRMRole):
    """A step a digit, worth a tenth of it; null for numbers below 10. `config`: seconds a call takes."""

    queue_rows = 4

    def score(self, batch: Batch, *, reduce: StepReduce = "min") -> Batch:
        time.sleep(self.config or 0.0)
        steps = [[int(digit) / 10 for digit in text] for text in batch["response_text"].to_pylist()]
        reduced = {"min": min, "mean": lambda each: sum(each) / len(each), "last": lambda each: each[-1]}[reduce]
        scores = [reduced(each) if len(each) > 1 else None for each in steps]
        return batch.with_columns(
            {
                "step_scores": pa.array(steps, pa.list_(pa.float64())),
                "prm_score": pa.array(scores, pa.float64()),
                "prm_fault": pa.array(["one step" if score is None else None for score in scores], pa.string()),
            }
        )


STUBS: Mapping[str, type[Role]] = {"sampler": StubSampler, "prm": StubPRM, "orm": StubORM}


def dataset(rows: int, columns: Mapping[str, Any] | None = None) -> Dataset:
    """Questions q0, q1, ... with columns of a dataset's own, and tokens nobody asks for."""
    table = {
        "uid": [f"q{i}" for i in range(rows)],
        "prompt_ids": [[1, i] for i in range(rows)],
        "prompt_length": np.full(rows, 2, np.int32),
        "messages": [[{"role": "user", "content": f"How much is {i}?"}] for i in range(rows)],
        "answer": [str(i) for i in range(rows)],
        "nested": [{"tags": ["a"] * (i % 3), "level": i} for i in range(rows)],
        **(columns or {}),
    }
    report = Report("here", rows=rows + 1, kept=rows)
    report.dropped["no prompt"] = 1
    return Dataset(Batch.from_columns(table), report)


async def run_sampling(
    folder: Path,
    config: SamplingConfig | None = None,
    *,
    rows: int = 10,
    data: Dataset | None = None,
    roles: Mapping[str, type[Role]] = STUBS,
    settings: Mapping[str, Any] | None = None,
    replicas: Mapping[str, int] | None = None,
    use_ray: bool = False,
    colocate: Sequence[Sequence[str]] = (),
    **root: Any,
) -> Path:
    """A whole sampling run in `folder`; `settings` are the roles' configs, `root` keys of the top level."""
    config = config or SamplingConfig(num_return_sequences=4, num_sampling_batch_size=3)
    counts = {role: (replicas or {}).get(role, 1) for role in roles}
    run_config = config_of(config, roles, colocate=colocate, **root)
    if ending := Sampling.begin(run_config, folder):
        (folder / "ending.txt").write_text(ending)
        return folder
    specs = {role: RoleSpec(kind, (settings or {}).get(role)) for role, kind in roles.items()}
    async with AsyncExitStack() as stack:
        telemetry = Telemetry(folder)
        stack.callback(telemetry.close)
        telemetry.timeline.place(counts)
        options = GraphOptions(exp_name=folder.name, run_dir=str(folder), use_ray=use_ray)
        plan = Plan(slots_of(counts), tuple((role,) for role in roles), "cpu")
        graph = await stack.enter_async_context(RoleGraph(plan, specs, options, on_call=telemetry.timeline.call))
        handles: dict[str, Any] = {role: graph.groups[role].handle for role in roles}
        scorers = Scorers(
            {role: handle for role, handle in handles.items() if is_scorer(role)},
            weights=config.score_weights,
            reduce=config.prm_reward or "min",
        )
        kinds = {role: Sampling.interface_of(role) for role in roles}
        turns = TurnTaker(turns_of(run_config.placement.sharing(run_config.roles), kinds, run_config.placement))
        data = data or dataset(rows)
        if use_ray:
            data = Dataset(data.rows.share(), data.report)
        job = Run(run_config, data, telemetry, turns=turns, scorers=scorers)
        algorithm = Sampling(config, job)
        for role in dict.fromkeys((*Sampling.roles(), *handles)):
            setattr(algorithm, role, handles.get(role))
        await algorithm.run()
    return folder


def slots_of(counts: Mapping[str, int]) -> dict[str, tuple[Slot, ...]]:
    """So many replicas of each role, on cores that nobody counts."""
    return {
        role: tuple(
            Slot(role, rank, "this machine", "cpu", (), 0.0, 1, Mesh(dp=count).at(rank)) for rank in range(count)
        )
        for role, count in counts.items()
    }


def config_of(
    config: SamplingConfig, roles: Mapping[str, Any], *, colocate: Sequence[Sequence[str]] = (), **root: Any
) -> RunConfig:
    """The checked config of such a run."""
    values: dict[str, Any] = {name: getattr(RootConfig(), name) for name in RootConfig.__dataclass_fields__}
    values |= {"max_steps": None, "placement": PlacementConfig(colocate_groups=tuple(map(tuple, colocate))), **root}
    tree = {"seed": values["seed"], "algorithm": json.loads(json.dumps(vars(config), default=dict))}
    specs = {role: Spec(f"{kind.__module__}.{kind.__name__}", None) for role, kind in roles.items()}
    spec = Spec("rolegraph.algorithms.sampling.Sampling", config)
    return cast(RunConfig, replace(RunConfig(**values, algorithm=spec, roles=specs), tree=tree))


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
