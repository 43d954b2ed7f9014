"""What the role on transformers saves and takes back: exactly what it was, or an error that says why not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.errors import CheckpointError
from tests.models import make_checkpoint
from tests.roles.train.megatron_workers import NLL, make_batch
from tests.roles.train.saves import (
    SETTINGS,
    averaged,
    check_that_a_full_disk_costs_one_save,
    logprobs,
    save,
    train,
)

pytestmark = pytest.mark.engine

Start = Callable[..., Any]


@pytest.fixture
def hf(start: Start) -> Start:
    return partial(start, backend="huggingface")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_goes_on_bit_for_bit_from_the_moment_of_the_save(hf: Start, tmp_path: Path, dtype: str) -> None:
    """Training goes on while it is written; a reference of the middle and the average are part of it."""
    role = hf(dtype=dtype, **SETTINGS)
    role.step(make_batch(8, 0), loss=NLL)
    role.save_reference()
    role.average_weights(0.5)
    role.step(make_batch(8, 1), loss=NLL)
    role.average_weights(0.5)
    expected = [logprobs(role), logprobs(role, reference=True), averaged(role)]
    folder = tmp_path / "saved"
    folder.mkdir()
    role.save(str(folder))
    drawn = torch.rand(3)
    followed = train(role)
    role.finish_save()
    assert not role.is_saving()

    role = hf(dtype=dtype, **SETTINGS)
    role.load(str(folder))
    assert torch.equal(torch.rand(3), drawn)
    found = [logprobs(role), logprobs(role, reference=True), averaged(role)]
    assert all((one == other).all() for one, other in zip(expected, found, strict=True))
    assert train(role) == followed


def test_the_reference_of_the_start_is_not_written(hf: Start, tmp_path: Path) -> None:
    """It is in the model's folder; and a role whose reference has moved gets it back from there."""
    role = hf(**SETTINGS)
    initial = logprobs(role, reference=True)
    role.step(make_batch(8, 0), loss=NLL)
    folder = save(role, tmp_path / "saved")
    assert torch.load(folder / "common.pt")["rolegraph"]["reference"] is False
    role.save_reference()
    assert (logprobs(role, reference=True) != initial).any()
    role.load(str(folder))
    assert (logprobs(role, reference=True) == initial).all()


def test_weights_alone_leave_the_rest_as_it_is_and_the_first_step_starts_anew(hf: Start, tmp_path: Path) -> None:
    role = hf(**SETTINGS)
    untouched = save(role, tmp_path / "untouched")
    role.step(make_batch(8, 0), loss=NLL)
    trained = logprobs(role)
    folder = save(role, tmp_path / "saved")
    role.load(str(untouched))
    followed = train(role)

    role = hf(**SETTINGS)
    assert train(role) == followed
    role = hf(**SETTINGS)
    role.load(str(folder), weights_only=True)
    assert (logprobs(role) == trained).all()
    assert role._trainer.steps == 0
    assert not role._policy.optimizer.state


def test_folders_that_are_not_whole_or_of_something_else_are_refused(hf: Start, folder: Path, tmp_path: Path) -> None:
    role = hf()
    before, saved = logprobs(role), save(role, tmp_path / "saved")
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp has {len(data) - 1} bytes, of {len(data)}"):
        role.load(str(saved))
    (saved / "__0_0.distcp").write_bytes(data)
    for name in (".metadata", "common.pt"):
        kept = (saved / name).read_bytes()
        (saved / name).unlink()
        with pytest.raises(CheckpointError, match=f"not whole: {name} is missing"):
            role.load(str(saved))
        (saved / name).write_bytes(kept)
    assert (logprobs(role) == before).all()
    role = hf(dtype="bfloat16")
    with pytest.raises(CheckpointError, match="dtype is float32 in it, and bfloat16 here"):
        role.load(str(saved))
    make_checkpoint(folder / "three", "qwen3", tied=True, num_hidden_layers=3)
    role = hf("three")
    with pytest.raises(CheckpointError, match=r"model\.num_hidden_layers is 2 in it, and 3 here"):
        role.load(str(saved))


def test_a_checkpoint_of_another_backend_is_refused(hf: Start, tmp_path: Path) -> None:
    role = hf()
    saved = save(role, tmp_path / "saved")
    torch.save({"rolegraph": {"format": 1, "model": {}}}, saved / "common.pt")
    with pytest.raises(CheckpointError, match="has format 1, and train=huggingface reads huggingface-1"):
        role.load(str(saved))


def test_a_write_that_fails_is_told_and_the_next_one_succeeds(hf: Start, tmp_path: Path) -> None:
    check_that_a_full_disk_costs_one_save(hf(**SETTINGS), tmp_path)
