"""What a train role of any backend does around a checkpoint, and what it says of itself to compare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rolegraph.errors import CheckpointError
from tests.disks import small_files
from tests.roles.train.megatron_workers import NLL, make_batch

SETTINGS: dict[str, Any] = {"warmup_steps": 9, "weight_decay": 0.1, "reference": "initial"}
LATER = [make_batch(8, seed) for seed in (2, 3)]


def train(role: Any) -> list[tuple[float, float, float]]:
    """The steps that follow a checkpoint, as far as they differ where anything does."""
    seen = [role.step(batch, loss=NLL) for batch in LATER]
    return [(metrics["loss"], metrics["grad_norm"], metrics["lr"]) for metrics in seen]


def save(role: Any, folder: Path) -> Path:
    folder.mkdir()
    role.save(str(folder))
    role.finish_save()
    return folder


def check_that_a_full_disk_costs_one_save(role: Any, folder: Path) -> None:
    """A limit on the size of files plays the full disk: it is told, and the next save is whole."""
    role.step(make_batch(8, 0), loss=NLL)
    first = folder / "first"
    first.mkdir()
    with small_files(100_000):
        role.save(str(first))
        deadline = time.monotonic() + 60
        while role.is_saving() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match=r"not complete: rank 0: File too large"):
            role.finish_save()
    assert not (first / ".metadata").exists()
    role.finish_save()  # there is nothing left to finish
    with pytest.raises(CheckpointError, match="not whole"):
        role.load(str(first))
    second = save(role, folder / "second")
    followed = train(role)
    role.load(str(second))
    assert train(role) == followed


def logprobs(role: Any, *, reference: bool = False) -> Any:
    column = "ref_logprobs" if reference else "logprobs"
    return role.logprobs(LATER[0], reference=reference).ragged(column).values


def averaged(role: Any) -> Any:
    return role.teach(LATER[0], weights="average").ragged("teacher_token_logprobs").values
