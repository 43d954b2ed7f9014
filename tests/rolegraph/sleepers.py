"""Roles that take fixed times instead of computing, and a GRPO run of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np

from rolegraph.algorithms.config import GRPOConfig
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.scorers import Scorers
from rolegraph.batch import Batch
from rolegraph.data import Dataset
from rolegraph.data.report import Report
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.interfaces import LossSpec, ORMRole, RolloutRole, SamplingParams, TensorInfo, TrainRole, TransferGroup
from rolegraph.placement import Plan, Slot
from rolegraph.role import Mesh, Role
from rolegraph.run import Run
from rolegraph.telemetry import Telemetry
from rolegraph.turns import TurnTaker
from rolegraph.weights import WeightSync

SYNC_S = 0.01


class Trainer(TrainRole):
    """A step takes `config` seconds."""

    def step(
        self, batch: Batch, *, loss: LossSpec, temperature: float = 1.0, lr: float | None = None
    ) -> dict[str, float]:
        time.sleep(self.config)
        return {"loss": 0.5, "tokens": float(batch.numpy("response_length").sum()), "rows": float(len(batch))}

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def weight_manifest(self) -> list[TensorInfo]:
        return []

    def connect_weights(self, group: TransferGroup) -> None:
        return None

    def send_weights(self, bucket_bytes: int) -> float:
        time.sleep(SYNC_S)
        return SYNC_S

    def disconnect_weights(self) -> None:
        return None


class Sampler(RolloutRole):
    """A call of `generate`, of up to 64 prompts, takes `config` seconds."""

    queue_rows = 64
    version = 0

    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        first = self.version
        time.sleep(self.config)
        rows = prompts.repeat(sampling.n)
        lengths = np.full(len(rows), 2, np.int32)
        return rows.with_columns(
            {
                "repeat": np.tile(np.arange(sampling.n, dtype=np.int32), len(prompts)),
                "step": np.full(len(rows), sampling.step, np.int32),
                "response_ids": [[1, 2]] * len(rows),
                "rollout_logprobs": [[0.0, 0.0]] * len(rows),
                "finish_reason": ["stop"] * len(rows),
                "weight_version": np.full(len(rows), first, np.int64),
                "weight_version_last": np.full(len(rows), self.version, np.int64),
                "response_length": lengths,
                "length": lengths + 2,
            }
        )

    def abort(self) -> int:
        return 0

    def transfer_workers(self) -> tuple[int, int]:
        return self.context.rank, 1

    def connect_weights(self, group: TransferGroup) -> None:
        return None

    def receive_weights(self, manifest: list[TensorInfo], bucket_bytes: int, version: int) -> float:
        time.sleep(SYNC_S)
        self.version = version
        return SYNC_S

    def disconnect_weights(self) -> None:
        return None


class Judge(ORMRole):
    """Gives the samples of a prompt different rewards, at once."""

    queue_rows = 64

    def score(self, batch: Batch) -> Batch:
        reward = batch.numpy("repeat").astype(np.float64)
        return batch.with_columns({"reward": reward, "reward_faults": np.zeros(len(batch), np.int32)})


SLEEPERS: Mapping[str, type[Role]] = {"train": Trainer, "rollout": Sampler, "orm": Judge}


async def run_grpo(
    folder: Path,
    config: GRPOConfig,
    settings: Mapping[str, Any],
    *,
    steps: int,
    use_ray: bool,
    roles: Mapping[str, type[Role]] = SLEEPERS,
) -> Path:
    """A whole GRPO run in `folder`; `settings` are the roles' configs by name."""
    slots = {role: (Slot(role, 0, "this machine", "cpu", (), 0.0, 1, Mesh()),) for role in roles}
    plan = Plan(slots, tuple((role,) for role in roles), "cpu")
    specs = {role: RoleSpec(kind, settings.get(role)) for role, kind in roles.items()}
    rows = Batch.from_columns(
        {"uid": [f"p{i}" for i in range(64)], "prompt_ids": [[1, i] for i in range(64)], "answer": ["1"] * 64}
    )
    async with AsyncExitStack() as stack:
        telemetry = Telemetry(folder)
        stack.callback(telemetry.close)
        telemetry.timeline.place(dict.fromkeys(roles, 1))
        options = GraphOptions(exp_name=folder.name, run_dir=str(folder), use_ray=use_ray)
        graph = await stack.enter_async_context(RoleGraph(plan, specs, options, on_call=telemetry.timeline.call))
        train, rollout = graph.handle("train", TrainRole), graph.handle("rollout", RolloutRole)
        sync = WeightSync(train, [rollout], drain=config.on_sync == "drain")
        run_config: Any = type("Config", (), {"seed": 0, "max_steps": steps})
        scorers = Scorers({"orm": graph.handle("orm", ORMRole)})
        job = Run(run_config, Dataset(rows, cast(Report, None)), telemetry, sync, TurnTaker(), scorers=scorers)
        algorithm = GRPO(config, job)
        algorithm.train, algorithm.rollout = train, rollout
        await algorithm.run()
    return folder
