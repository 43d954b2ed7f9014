"""Roles without models whose every number follows from seeds and from what came before, and that save and load.

The trainer's weights are one number: a hash of all it was ever trained on. Its losses, the ids that engines draw and
what a teacher says follow from it, so that two runs with the same metrics have seen the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.errors import CheckpointError
from rolegraph.interfaces import (
    AdapterInfo,
    HeadInfo,
    LossSpec,
    ORMRole,
    PolicyWeights,
    RolloutRole,
    SamplingParams,
    TeacherRole,
    TensorInfo,
    TrainRole,
    TransferGroup,
)

WIRE: queue.Queue[int] = queue.Queue()
"""Weights on their way; all roles are in one process."""
FILES = 5


@dataclass(frozen=True, kw_only=True)
class LastingConfig:
    """Seconds that a call takes, and what a trainer needs."""

    never_on_gpu: ClassVar[bool] = True
    ranks: int = 1
    seconds: float = 0.0
    save_seconds: float = 0.05
    """Behind each of the files of a checkpoint."""
    save_bytes: int = 2000
    model: str | None = None
    seed: int | None = None
    lr: float = 1.0
    lr_schedule: str = "constant"
    decay_steps: int | None = None
    min_lr: float = 0.0
    fails: Mapping[str, str] = field(default_factory=dict)


def number(*parts: object) -> int:
    """A number that these name."""
    return int(hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:12], 16)


class LastingTrain(TrainRole):
    """Trains a number."""

    Config = LastingConfig
    config: LastingConfig

    def setup(self) -> None:
        self.state: dict[str, Any] = {"weights": 1, "initial": 1, "average": None, "steps": 0}
        self.random = np.random.default_rng(self.config.seed)
        self.writing: threading.Thread | None = None
        self.fault: str | None = None

    def step(
        self, batch: Batch, *, loss: LossSpec, temperature: float = 1.0, lr: float | None = None
    ) -> dict[str, float]:
        time.sleep(self.config.seconds)
        end = self.config.decay_steps or 1
        falls = self.config.lr_schedule == "linear"
        rate = lr or self.config.lr * (1 - self.state["steps"] / end if falls else 1)
        seen = number(*(f"{name}={batch[name].to_pylist()}" for name in sorted(batch.column_names)))
        self.state["weights"] = number(self.state["weights"], seen, rate, loss, self.random.random())
        self.state["steps"] += 1
        return {
            "loss": self.state["weights"] / 2**48,
            "lr": rate,
            "seen": float(seen),
            "tokens": float(batch.numpy("response_length").sum()),
            "rows": float(len(batch)),
        }

    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, reference: bool = False, entropy: bool = False
    ) -> Batch:
        weights = self.state["initial" if reference else "weights"]
        values = tokens_of(batch, weights)
        columns: dict[str, Any] = {"ref_logprobs" if reference else "logprobs": values}
        if reference:
            columns["ref_kl"] = [float(row.sum()) for row in values]
        return Batch.from_columns(columns)

    def teach(
        self, batch: Batch, *, weights: PolicyWeights, topk: int = 0, hidden: bool = False, temperature: float = 1.0
    ) -> Batch:
        return said_of(batch, self.state[weights.replace("current", "weights")], topk)

    def average_weights(self, decay: float) -> None:
        before = self.state["average"]
        self.state["average"] = self.state["weights"] if before is None else number(before, self.state["weights"])

    def use_teacher_head(self, head: Batch | PolicyWeights, info: HeadInfo | None = None) -> None:
        return None

    def reset_optimizer(self) -> None:
        self.state["steps"] = 0

    def save_reference(self) -> None:
        self.state["initial"] = self.state["weights"]

    # Checkpoints

    def save(self, path: str) -> None:
        assert not list(Path(path).iterdir()), "the folder is empty"
        assert self.writing is None, "one save at a time"
        state = json.dumps({**self.state, "random": self.random.bit_generator.state})
        self.fault = None
        self.writing = threading.Thread(target=self._write, args=(Path(path), state), daemon=True)
        self.writing.start()

    def _write(self, path: Path, state: str) -> None:
        try:
            for part in range(FILES):
                size = -(-len(state) // FILES)
                filler = b"x" * self.config.save_bytes
                with (path / f"part-{part}.txt").open("wb") as file:
                    file.write(filler + state[part * size : (part + 1) * size].encode())
                time.sleep(self.config.save_seconds)
        except OSError as error:
            self.fault = os.strerror(error.errno or 0)
            time.sleep(self.config.save_seconds)  # other ranks still write

    def is_saving(self) -> bool:
        return self.writing is not None and self.writing.is_alive()

    def finish_save(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.join()
            if self.fault is not None:
                raise CheckpointError(f"rank 0 could not write: {self.fault}")

    def load(self, path: str, *, weights_only: bool = False) -> None:
        parts = [Path(path, f"part-{part}.txt").read_text() for part in range(FILES)]
        self.state = json.loads("".join(part[self.config.save_bytes :] for part in parts))
        self.random.bit_generator.state = self.state.pop("random")

    # Weights

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def weight_manifest(self, *, adapter: bool = False) -> list[TensorInfo]:
        return []

    def adapter_info(self) -> AdapterInfo | None:
        return None

    def connect_weights(self, group: TransferGroup) -> None:
        return None

    def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> float:
        WIRE.put(self.state["weights"])
        return 0.0

    def disconnect_weights(self) -> None:
        return None


class LastingRollout(RolloutRole):
    """Draws ids that follow from the seed, the step, the row, and the weights."""

    Config = LastingConfig
    config: LastingConfig
    queue_rows = 64
    version = 0
    weights = 0

    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        assert self.version, "synced before it draws"
        time.sleep(self.config.seconds)
        rows = prompts.repeat(sampling.n)
        repeats = np.tile(np.arange(sampling.n, dtype=np.int32), len(prompts))
        ids = [
            self._draw(sampling, uid, repeat)
            for uid, repeat in zip(rows["uid"].to_pylist(), repeats.tolist(), strict=True)
        ]
        lengths = np.array([len(row) for row in ids], np.int32)
        return rows.with_columns(
            {
                "repeat": repeats,
                "step": np.full(len(rows), sampling.step, np.int32),
                "response_ids": ids,
                "response_mask": [np.ones(len(row), np.uint8) for row in ids],
                "rollout_logprobs": [(row / -9.0).astype(np.float32) for row in ids],
                "finish_reason": ["length" if len(row) == sampling.max_tokens else "stop" for row in ids],
                "weight_version": np.full(len(rows), self.version, np.int64),
                "weight_version_last": np.full(len(rows), self.version, np.int64),
                "response_length": lengths,
                "length": lengths + rows.numpy("prompt_length").astype(np.int32),
            }
        )

    def _draw(self, sampling: SamplingParams, uid: str, repeat: int) -> np.ndarray[Any, Any]:
        draw = np.random.default_rng(number(sampling.seed, sampling.step, uid, repeat, self.weights))
        return draw.integers(0, 50, draw.integers(1, sampling.max_tokens + 1)).astype(np.int32)

    def abort(self) -> int:
        return 0

    def transfer_workers(self) -> tuple[int, int]:
        return self.context.rank, 1

    def connect_weights(self, group: TransferGroup) -> None:
        return None

    def receive_weights(
        self, manifest: list[TensorInfo], bucket_bytes: int, version: int, *, adapter: AdapterInfo | None = None
    ) -> float:
        self.weights, self.version = WIRE.get(timeout=10), version
        return 0.0

    def disconnect_weights(self) -> None:
        return None


class LastingORM(ORMRole):
    """What a response is worth follows from its ids."""

    Config = LastingConfig
    config: LastingConfig
    queue_rows = 64

    def score(self, batch: Batch) -> Batch:
        rewards = np.array([number(*row) % 5 / 4 for row in batch.lists("response_ids")])
        return batch.with_columns({"reward": rewards, "reward_faults": np.zeros(len(batch), np.int32)})


class LastingTeacher(TeacherRole):
    """What it says follows from the ids."""

    Config = LastingConfig
    config: LastingConfig
    queue_rows = 64

    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        return said_of(batch, 7, topk)


def tokens_of(batch: Batch, weights: int) -> list[np.ndarray[Any, Any]]:
    """[response] numbers of each row that follow from its ids and the weights."""
    return [
        np.random.default_rng(number(weights, *row)).random(len(row)).astype(np.float32)
        for row in batch.lists("response_ids")
    ]


def said_of(batch: Batch, weights: int, topk: int) -> Batch:
    """A teacher's columns."""
    values = tokens_of(batch, weights)
    columns: dict[str, Any] = {"teacher_token_logprobs": values}
    if topk:
        columns["teacher_ids"] = [np.tile(np.arange(topk, dtype=np.int32), (len(row), 1)) for row in values]
        columns["teacher_logprobs"] = [np.repeat(row[:, None], topk, axis=1) for row in values]
    return Batch.from_columns(columns)
