"""Roles and a run in memory: what the driver programs call, recorded, with token columns nobody can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rolegraph.algorithms.config import SelfTeacherConfig
from rolegraph.algorithms.hooks import Hook
from rolegraph.algorithms.scorers import Scorers
from rolegraph.algorithms.teachers import SelfTeacher, Teachers
from rolegraph.batch import Batch
from rolegraph.data.dataset import Batches
from rolegraph.interfaces import LossSpec, PolicyWeights, SamplingParams
from rolegraph.placement import PlacementConfig
from rolegraph.turns import Parts, TurnTaker, turns_of


def away(columns: Mapping[str, Any]) -> Batch:
    """A batch as the driver has it after a call; reading a token column raises, and fetching one would crash."""
    light, _ = Batch.from_columns(columns).to_parts()
    return Batch.from_parts(light, object())  # type: ignore[arg-type]


class Dataset:
    """Prompts p0, p1, ... in order; with responses where a warm start needs them."""

    def __init__(self, size: int, responses: bool = False) -> None:
        columns: dict[str, Any] = {
            "uid": [f"p{i}" for i in range(size)],
            "prompt_ids": [[1, i] for i in range(size)],
            "prompt_length": np.full(size, 2, np.int32),
            "answer": [str(i) for i in range(size)],
        }
        if responses:
            columns |= {
                "response_ids": [[7]] * size,
                "response_length": np.ones(size, np.int32),
                "length": np.full(size, 3, np.int32),
            }
        self.rows = away(columns)
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, size: int, seed: int, start: int = 0) -> Batches:
        self.asked.append((size, seed))
        return Batches(self.rows, size, seed, shuffle=False, start=start)


class Telemetry:
    """Keeps everything it is told."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.stages: list[tuple[str, int]] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.offset = 0
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.shown: list[Any] = []
        self.earlier: dict[int, Mapping[str, float]] = {}
        """Evaluations of an earlier part of the run."""
        self.phases: list[str] = []
        self.sampled: list[tuple[int, Batch]] = []

    @contextmanager
    def phase(self, name: str, *roles: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self.phases.append("evaluation")
        yield

    def stage(self, name: str, steps: int, done: int = 0) -> None:
        self.offset = sum(steps for _, steps in self.stages)
        self.stages.append((name, steps))

    def in_log(self, step: int) -> int:
        return self.offset + step

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"log evaluation at {self.offset}")
        self.evaluations.append((self.offset, dict(metrics)))

    def evaluated_late(self, metrics: Mapping[str, float]) -> None:
        self.calls.append("log evaluation late")
        self.late = dict(metrics)

    def logged(self, prefix: str) -> dict[int, Mapping[str, float]]:
        return {**self.earlier, **dict(self.evaluations)}

    def tables(self, tables: Any) -> None:
        self.shown += tables

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"log {step}")
        self.steps.append((step, dict(metrics)))

    @property
    def last_step(self) -> int:
        return len(self.steps)

    def state(self) -> dict[str, int]:
        return {}

    def sync_log(self) -> None:
        self.calls.append("sync log")

    def samples(self, step: int, batch: Batch) -> None:
        self.sampled.append((step, batch))

    def event(self, text: str) -> None:
        self.events.append(text)

    def metric(self, name: str) -> list[float | None]:
        """One metric over the steps, None where a step did not log it."""
        return [metrics.get(name) for _, metrics in self.steps]


class Sync:
    def __init__(self, calls: list[str]) -> None:
        self.calls, self.version = calls, 0

    async def sync(self) -> float:
        self.version += 1
        self.calls.append(f"sync {self.version}")
        return 0.0

    async def refresh(self) -> float:
        self.calls.append(f"refresh at {self.version}")
        return 0.0


class Train:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.steps: list[tuple[Batch, LossSpec, float, float | None]] = []
        self.scored: list[Batch] = []
        self.ref_kl: Callable[[Batch], np.ndarray[Any, Any]] = lambda batch: np.zeros(len(batch))

    async def step(
        self, batch: Batch, *, loss: LossSpec, temperature: float = 1.0, lr: float | None = None
    ) -> dict[str, float]:
        self.calls.append("step")
        self.steps.append((batch, loss, temperature, lr))
        return {"loss": 0.5, "tokens": float(batch.numpy("response_length").sum()), "seconds": 1.25}

    async def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, reference: bool = False, entropy: bool = False
    ) -> Batch:
        self.calls.append(f"{'ref_' if reference else ''}logprobs at {temperature}" + (" entropy" if entropy else ""))
        self.scored.append(batch)
        token_columns = {"ref_logprobs": [[0.0]] * len(batch)} if reference else {"logprobs": [[0.0]] * len(batch)}
        columns: dict[str, Any] = dict(token_columns)
        if entropy:
            columns["entropy"] = [[0.0]] * len(batch)
        if reference and "logprobs" in batch:
            columns["ref_kl"] = self.ref_kl(batch)
        return away(columns)

    async def teach(self, batch: Batch, *, weights: str, topk: int, hidden: bool, temperature: float) -> Batch:
        self.calls.append(f"teach with {weights}")
        return scores(batch, topk, hidden)

    async def average_weights(self, decay: float) -> list[None]:
        self.calls.append(f"average {decay}")
        return [None]

    async def use_teacher_head(self, head: Any, info: Any = None) -> list[None]:
        self.calls.append(f"head of {head}")
        return [None]

    async def offload(self, model: bool, optimizer: bool) -> list[None]:
        self.calls.append(f"offload{' model' * model}{' optimizer' * optimizer}")
        return [None]

    async def onload(self, model: bool, optimizer: bool) -> list[None]:
        self.calls.append(f"onload{' model' * model}{' optimizer' * optimizer}")
        return [None]

    async def reset_optimizer(self) -> list[None]:
        self.calls.append("reset_optimizer")
        return [None]

    async def save_reference(self) -> list[None]:
        self.calls.append("save_reference")
        return [None]


@dataclass
class Rollout:
    calls: list[str]
    sync: Sync
    lengths: Callable[[int], int] = lambda row: 4
    prompts: list[Batch] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)

    async def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        self.calls.append("generate")
        self.prompts.append(prompts)
        self.sampling.append(sampling)
        rows = prompts.repeat(sampling.n)
        size = len(rows)
        lengths = [self.lengths(i) for i in range(size)]
        drawn = away(
            {
                "repeat": np.tile(np.arange(sampling.n, dtype=np.int32), len(prompts)),
                "step": np.full(size, sampling.step, np.int32),
                "response_ids": [[5] * n for n in lengths],
                "rollout_logprobs": [[0.0] * n for n in lengths],
                "finish_reason": ["length" if n == sampling.max_tokens else "stop" for n in lengths],
                "weight_version": np.full(size, self.sync.version, np.int64),
                "response_length": np.array(lengths, np.int32),
                "length": np.array(lengths, np.int32) + 2,
            }
        )
        return rows.merge(drawn)

    async def sleep(self, level: int) -> list[None]:
        self.calls.append(f"sleep {level}")
        return [None]

    async def wake_up(self, parts: tuple[str, ...]) -> list[None]:
        self.calls.append(f"wake {' '.join(parts)}")
        return [None]


def scores(batch: Batch, topk: int, hidden: bool, mark: float = 0.0) -> Batch:
    """A teacher's columns; the light one `mark` says whose they are."""
    size = len(batch)
    columns: dict[str, Any] = {"teacher_token_logprobs": [[0.0]] * size, "mark": np.full(size, mark)}
    if topk:
        columns["teacher_logprobs"] = [np.zeros((1, topk), np.float32)] * size
    if hidden:
        columns["teacher_hidden"] = [np.zeros((1, 2), np.float32)] * size
    return away(columns)


@dataclass
class Teacher:
    calls: list[str]
    role: str
    asked: list[tuple[Batch, int, bool, float]] = field(default_factory=list)

    async def score(self, batch: Batch, *, topk: int, hidden: bool, temperature: float) -> Batch:
        self.calls.append(f"{self.role} scores {len(batch)}")
        self.asked.append((batch, topk, hidden, temperature))
        return scores(batch, topk, hidden, mark=float(len(self.role)))

    async def head(self) -> tuple[str, str]:
        return self.role, "info"

    async def offload(self) -> list[None]:
        self.calls.append(f"offload {self.role}")
        return [None]

    async def onload(self) -> list[None]:
        self.calls.append(f"onload {self.role}")
        return [None]


@dataclass
class ORM:
    """Rewards by call: `rewards[k]` are those of call k, the last ones for all further calls."""

    calls: list[str]
    rewards: Sequence[Sequence[float | None]]
    rounds: int = 0

    async def score(self, batch: Batch) -> Batch:
        self.calls.append("score")
        rewards = list(self.rewards[min(self.rounds, len(self.rewards) - 1)])
        self.rounds += 1
        return batch.with_columns(
            {
                "reward": np.array([np.nan if r is None else r for r in rewards]),
                "rewards/exact": np.array([np.nan if r is None else r for r in rewards]),
                "reward_faults": np.array([r is None for r in rewards], np.int32),
            }
        )


@dataclass
class PRM:
    """The same score for every row of a call, and two steps each; null where it is None."""

    calls: list[str]
    scores: Sequence[float | None]
    name: str = "prm"
    reduces: list[str] = field(default_factory=list)

    async def score(self, batch: Batch, *, reduce: str) -> Batch:
        self.calls.append(f"{self.name} scores")
        self.reduces.append(reduce)
        size = len(batch)
        steps = away({"step_scores": [[0.5, 1.0]] * size, "step_ends": [[1, 4]] * size, "prm_fault": [None] * size})
        return batch.merge(steps).with_columns({"prm_score": list(self.scores)})

    async def offload(self) -> list[None]:
        self.calls.append(f"offload {self.name}")
        return [None]

    async def onload(self) -> list[None]:
        self.calls.append(f"onload {self.name}")
        return [None]


@dataclass
class TrainMoves:
    """What `rolegraph.movers` does with a handle."""

    train: Train

    async def away(self, parts: Parts) -> None:
        await self.train.offload("model" in parts, "optimizer" in parts)

    async def back(self, parts: Parts) -> None:
        await self.train.onload("model" in parts, "optimizer" in parts)


@dataclass
class EngineMoves:
    """What `rolegraph.movers` does with a handle."""

    rollout: Rollout
    level: int

    async def away(self, parts: Parts) -> None:
        await self.rollout.sleep(self.level)

    async def back(self, parts: Parts) -> None:
        await self.rollout.wake_up(parts)


@dataclass
class TeacherMoves:
    """What `rolegraph.movers` does with a handle."""

    teacher: Teacher | PRM

    async def away(self, parts: Parts) -> None:
        await self.teacher.offload()

    async def back(self, parts: Parts) -> None:
        await self.teacher.onload()


class World:
    """An algorithm with everything it talks to; `placement` says who takes turns."""

    def __init__(
        self,
        algorithm: type[Any],
        config: Any,
        *,
        rewards: Sequence[Sequence[float | None]] = ((0.0,),),
        rows: int = 8,
        max_steps: int | None = 1,
        seed: int = 3,
        placement: PlacementConfig | None = None,
        teachers: Sequence[str] = (),
        teacher: PolicyWeights | None = None,
        teacher_temperature: float | None = None,
        prm: Sequence[float | None] | None = None,
        orms: Mapping[str, Sequence[float | None]] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """`teachers` are roles of their own; `teacher` the policy's weights that teach.

        `prm` are the scores it gives in every call, `orms` the rewards of further outcome roles. Those and `orm` are
        functions, which take no device; the prm is a model.
        """
        self.calls: list[str] = []
        self.telemetry, self.sync = Telemetry(self.calls), Sync(self.calls)
        placement = placement or PlacementConfig()
        kinds = {role: kind for role, (kind, _) in algorithm.roles().items() if role != "orm"}
        groups = [[role for role in group if role in kinds] for group in placement.colocated]
        self.turns = TurnTaker(turns_of(groups, kinds, placement))
        self.dataset = Dataset(rows, responses=config.data_needs != "prompt")
        job = SimpleNamespace(
            config=SimpleNamespace(
                seed=seed, max_steps=max_steps, keeps_reference=config.needs_reference or isinstance(teacher, str)
            ),
            dataset=self.dataset,
            telemetry=self.telemetry,
            sync=self.sync,
            turns=self.turns,
            hooks=tuple(hooks),
        )
        self.train, self.rollout = Train(self.calls), Rollout(self.calls, self.sync)
        self.orm = ORM(self.calls, rewards)
        self.prm = None if prm is None else PRM(self.calls, prm)
        further = {role: ORM(self.calls, [given]) for role, given in (orms or {}).items()}
        per_step = getattr(config, "prm_reward", None) == "per_step"
        scorers: dict[str, Any] = {"orm": self.orm, **({"prm": self.prm} if self.prm else {}), **further}
        job.scorers = Scorers(
            scorers,
            weights=getattr(config, "score_weights", {}),
            left_out=frozenset({"prm"} if per_step else ()),
        )
        self.teachers = {role: Teacher(self.calls, role) for role in teachers}
        self.teacher: Any = self.teachers.get("teacher")
        handles: dict[str, Any] = dict(self.teachers)
        if teacher is not None:
            handles = {"teacher": SelfTeacher(SelfTeacherConfig(weights=teacher), cast(Any, self.train))}
        job.teachers = Teachers(handles, teacher_temperature)
        self.algorithm = algorithm(config, job)
        for name in algorithm.roles():
            setattr(self.algorithm, name, getattr(self, name))
        self.movers: dict[str, Any] = {
            "train": TrainMoves(self.train),
            "rollout": EngineMoves(self.rollout, placement.sleep_level),
            **{role: TeacherMoves(found) for role, found in self.teachers.items()},
            **({"prm": TeacherMoves(self.prm)} if self.prm else {}),
        }

    async def run(self) -> World:
        for role, mover in self.movers.items():
            await self.turns.started(role, mover)
        await self.algorithm.run()
        return self

    def trained(self, column: str) -> list[list[Any]]:
        """A light column of the batch of each optimizer step."""
        return [batch[column].to_pylist() for batch, *_ in self.train.steps]
