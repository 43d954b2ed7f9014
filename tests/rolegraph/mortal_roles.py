"""The roles of `lasting` as Ray actors, each of which kills its process once in a run, in the middle of a call."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolegraph.batch import Batch
from rolegraph.interfaces import LossSpec, SamplingParams, TransferGroup, first_rank
from rolegraph.role import Role, endpoint
from tests.rolegraph.lasting.lasting_roles import (
    LastingConfig,
    LastingORM,
    LastingRollout,
    LastingTeacher,
    LastingTrain,
)


@dataclass(frozen=True, kw_only=True)
class MortalConfig(LastingConfig):
    """`dies`: at which of its calls a rank dies, the first time; null: never."""

    dies: int | None = None
    fails_save: int | None = None
    """The step whose save fails on rank 0, the first time, while the others hang in it."""


class Mortal(Role):
    """Counts its calls."""

    calls = 0

    def live_or_die(self, rank: int = 0) -> None:
        """Rank `rank` dies; those beside it hang, as they would in a collective."""
        self.calls += 1
        died = Path(self.context.run_dir, f"died-{self.context.role}")
        if self.calls != self.config.dies or died.exists():
            return
        if self.context.rank == rank:
            time.sleep(0.2)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def wire(self, group: TransferGroup) -> None:
        """Weights travel in files."""
        self.path = Path(self.context.run_dir, f"wire-{group.port}")
        self.sent = 0

    def next_file(self) -> Path:
        self.sent += 1
        return self.path.with_name(f"{self.path.name}-{self.sent}")


class MortalTrain(Mortal, LastingTrain):
    """Each of two ranks trains on everything."""

    Config = MortalConfig

    @endpoint(collect=first_rank)
    def step(  # type: ignore[override]
        self, batch: Batch, *, loss: LossSpec, temperature: float = 1.0, lr: float | None = None
    ) -> dict[str, float]:
        self.live_or_die(rank=self.context.world_size - 1)
        return LastingTrain.step(self, batch, loss=loss, temperature=temperature, lr=lr)

    @endpoint()
    def save(self, path: str) -> None:
        failed = Path(self.context.run_dir, "failed-save")
        if Path(path).parent.name == f"step-{self.config.fails_save}" and not failed.exists():
            if self.context.rank:
                time.sleep(600)
            time.sleep(0.2)
            failed.touch()
            raise MemoryError("no host memory for a copy")
        if self.context.rank == 0:
            LastingTrain.save(self, path)

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", time.time_ns()

    def connect_weights(self, group: TransferGroup) -> None:
        self.wire(group)

    def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> float:
        if self.context.rank == 0:
            path = self.next_file()
            path.with_suffix(".part").write_text(str(self.state["weights"]))
            path.with_suffix(".part").rename(path)
        return 0.0


class MortalRollout(Mortal, LastingRollout):
    Config = MortalConfig

    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        self.live_or_die()
        return LastingRollout.generate(self, prompts, sampling)

    def connect_weights(self, group: TransferGroup) -> None:
        self.wire(group)

    def receive_weights(self, manifest: Any, bucket_bytes: int, version: int, *, adapter: Any = None) -> float:
        path, until = self.next_file(), time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < until, "nothing came"
            time.sleep(0.005)
        self.weights, self.version = int(path.read_text()), version
        return 0.0


class MortalORM(Mortal, LastingORM):
    Config = MortalConfig

    def score(self, batch: Batch) -> Batch:
        self.live_or_die()
        return LastingORM.score(self, batch)


class MortalTeacher(Mortal, LastingTeacher):
    Config = MortalConfig

    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        self.live_or_die()
        return LastingTeacher.score(self, batch, topk=topk, hidden=hidden, temperature=temperature)
