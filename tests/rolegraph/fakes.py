"""Roles without models, for tests of the graph."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.host import RoleSpec
from rolegraph.placement import Plan, Slot
from rolegraph.role import Mesh, Role, endpoint


def first(results: Sequence[dict[str, float]]) -> dict[str, float]:
    return results[0]


class Fake(Role):
    """Answers what it was given, who it is, and where it ran."""

    queue_in_flight = 4

    def setup(self) -> None:
        self.setup_thread = threading.get_ident()
        self.seen: list[int] = []
        if self.config == "fail in setup":
            raise RuntimeError("no weights here")
        if isinstance(self.config, threading.Event):
            self.config.wait()
        if self.config == f"hang in setup {self.context.rank}":
            print("asking the hub for weights", flush=True)
            time.sleep(600)
        if isinstance(self.config, Path) and not self.config.exists():
            self.config.touch()
            raise OSError("[Errno 98] Address already in use")

    @endpoint()
    def noop(self) -> None:
        return None

    @endpoint()
    def rank(self) -> int:
        return self.context.rank

    @endpoint(execute="first")
    def first_rank(self, value: list[int]) -> tuple[int, list[int]]:
        return self.context.rank, value

    @endpoint()
    def describe(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "in_setup_thread": threading.get_ident() == self.setup_thread,
            "pid": os.getpid(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "env": dict(os.environ),
            "argv": sys.argv[0],
            "config": self.config,
        }

    @endpoint(dispatch="slice", collect="flatten")
    def doubled(self, values: list[int], *, plus: int = 0) -> list[int]:
        return [2 * value + plus for value in values]

    @endpoint(dispatch="slice", collect="flatten")
    def identity(self, batch: Batch) -> Batch:
        return batch

    @endpoint(dispatch="dp", cost="length")
    def tag(self, batch: Batch) -> Batch:
        lengths = batch.ragged("response_ids").lengths
        return batch.with_columns({"rank": np.full(len(batch), self.context.rank), "sum": lengths * 10})

    @endpoint(dispatch="dp", collect=first)
    def step(self, batch: Batch, *, lr: float = 0.0) -> dict[str, float]:
        return {"rows": float(len(batch)), "lr": lr}

    @endpoint(dispatch="slice", collect="flatten")
    def halves(self, batch: Batch) -> tuple[Batch, list[str]]:
        return batch.select(["response_ids"]), batch["uid"].to_pylist()

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, n: int = 1, delay: float = 0.0) -> Batch:
        time.sleep(delay)
        out = prompts.repeat(n)
        return out.with_columns(
            {
                "repeat": list(range(n)) * len(prompts),
                "served": np.full(len(out), self.context.rank),
                "answer_ids": [row[::-1] for row in out.lists("response_ids")],
            }
        )

    @endpoint(dispatch="queue")
    def die_on(self, batch: Batch, uid: str, rank: int) -> Batch:
        if self.context.rank == rank and uid in batch["uid"].to_pylist():
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})

    @endpoint(dispatch="slice", collect="flatten")
    def states(self, batch: Batch) -> Batch:
        """Large columns, as a teacher makes them."""
        lengths = batch.numpy("length")
        states = [np.full((n, 4), n, np.float32) for n in lengths]
        return Batch.from_columns({"teacher_hidden": states, "teacher_token_logprobs": [[0.5] * n for n in lengths]})

    @endpoint(dispatch="slice", collect="flatten")
    def read_states(self, batch: Batch) -> list[tuple[bool, float]]:
        """Of each row: whether its states came with the call, and their sum, read a row at a time."""
        with_call = "teacher_hidden" in batch.schema.names
        rows = [batch.take([row]).fetch_sync(["teacher_hidden"]) for row in range(len(batch))]
        return [(with_call, float(row.ragged("teacher_hidden").values.sum())) for row in rows]

    @endpoint()
    def record(self, value: int, delay: float = 0.0) -> list[int]:
        time.sleep(delay)
        self.seen.append(value)
        return self.seen

    @endpoint()
    def fail_at(self, rank: int, message: str = "boom", hang: float = 0.0) -> int:
        if self.context.rank == rank:
            self._deep(message)
        time.sleep(hang)
        return self.context.rank

    def _deep(self, message: str) -> None:
        raise ValueError(message)

    @endpoint()
    def echo_failure(self, delay: float) -> None:
        """Rank 1 fails late, rank 0 first reports a lost peer."""
        if self.context.rank == 0:
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(delay)
        raise KeyError("the real one")

    @endpoint()
    def exit_at(self, rank: int, hang: float = 0.0) -> None:
        if self.context.rank == rank:
            print("last words of the actor", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(hang)

    @endpoint(lane="control")
    def are_you_there(self) -> float:
        return time.time()

    @endpoint()
    def spawn_child(self) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid


class Plain(Fake):
    """Overrides endpoints with plain methods: their options stay those of the base."""

    def doubled(self, values, *, plus=0):  # type: ignore[no-untyped-def, override]
        return [value + 1000 for value in Fake.doubled(self, values, plus=plus)]

    def identity(self, batch):  # type: ignore[no-untyped-def, override]
        return batch.with_columns({"seen": [True] * len(batch)})


def plan_of(role: str = "fake", ranks: int = 2, *, mesh: Mesh | None = None, cores: float = 0.5) -> Plan:
    """A plan of one role on CPU cores."""
    mesh = mesh or Mesh(dp=ranks)
    slots = tuple(Slot(role, rank, "this machine", "cpu", (), cores, 1, mesh.at(rank)) for rank in range(ranks))
    return Plan({role: slots}, ((role,),), "cpu")


def spec_of(role_class: type[Role] = Fake, config: Any = None) -> RoleSpec:
    return RoleSpec(role_class, config)


def batch_of(rows: int, *, seed: int = 0) -> Batch:
    """Rows of random lengths with their columns of light and heavy kinds."""
    lengths = np.random.default_rng(seed).integers(1, 40, rows)
    ids = [np.arange(length, dtype=np.int32) + 100 * i for i, length in enumerate(lengths)]
    return Batch.from_columns(
        {
            "uid": [f"u{i}" for i in range(rows)],
            "length": lengths.astype(np.int32),
            "response_ids": ids,
            "text": [f"text {i}" for i in range(rows)],
        }
    )


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: Sequence[int], *, seconds: float) -> list[int]:
    """Wait for processes to end; returns those that still run."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
