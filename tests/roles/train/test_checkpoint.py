"""What the Megatron role saves and takes back, on one rank: exactly what it was, or an error that says why not."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.errors import CheckpointError, TurnError
from roles.train.saving import HostWriter
from tests.disks import small_files
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


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_distributed_optimizer": False}, {"dtype": "bfloat16"}],
    ids=["distributed", "replicated", "bfloat16"],
)
def test_goes_on_bit_for_bit_from_the_moment_of_the_save(
    start: Start, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on before it is written; a reference of the middle and the average are part of it."""
    trained, write = threading.Event(), HostWriter.write
    monkeypatch.setattr(HostWriter, "write", lambda writer: write(writer) if trained.wait(60) else [])
    role = start(**SETTINGS | settings)
    role.step(make_batch(8, 0), loss=NLL)
    role.save_reference()
    role.average_weights(0.5)
    role.step(make_batch(8, 1), loss=NLL)
    role.average_weights(0.5)
    expected = [logprobs(role), logprobs(role, reference=True), averaged(role)]
    folder = tmp_path / "saved"
    folder.mkdir()
    role.save(str(folder))
    followed = train(role)
    assert role.is_saving()
    trained.set()
    role.finish_save()
    assert not role.is_saving()

    role = start(**SETTINGS | settings)
    role.load(str(folder))
    found = [logprobs(role), logprobs(role, reference=True), averaged(role)]
    assert all((one == other).all() for one, other in zip(expected, found, strict=True))
    assert train(role) == followed


def test_the_reference_of_the_start_is_not_written(start: Start, tmp_path: Path) -> None:
    """It is in the model's folder; and a role whose reference has moved gets it back from there."""
    role = start(**SETTINGS)
    initial = logprobs(role, reference=True)
    role.step(make_batch(8, 0), loss=NLL)
    folder = save(role, tmp_path / "saved")
    assert torch.load(folder / "common.pt")["rolegraph"]["reference"] is False
    role.save_reference()
    role.load(str(folder))
    assert (logprobs(role, reference=True) == initial).all()


def test_weights_alone_leave_the_rest_as_it_is(start: Start, tmp_path: Path) -> None:
    role = start(**SETTINGS)
    role.step(make_batch(8, 0), loss=NLL)
    trained = logprobs(role)
    folder = save(role, tmp_path / "saved")

    role = start(**SETTINGS | {"dtype": "float32"})
    role.load(str(folder), weights_only=True)
    assert (logprobs(role) == trained).all()
    assert role._trainer.steps == 0
    assert not any(part.optimizer.state for part in role._policy.optimizer.chained_optimizers)


def test_what_was_saved_before_the_first_step_starts_the_optimizer_anew(start: Start, tmp_path: Path) -> None:
    role = start(**SETTINGS)
    folder = save(role, tmp_path / "saved")
    followed = train(role)
    role.load(str(folder))
    assert train(role) == followed


# ----- folders that are not whole, or of something else -----


@pytest.fixture
def saved(start: Start, tmp_path: Path) -> tuple[Any, Path]:
    role = start()
    return role, save(role, tmp_path / "saved")


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt", "__0_0.distcp"])
def test_a_folder_without_one_of_its_files_is_refused(saved: tuple[Any, Path], name: str) -> None:
    role, folder = saved
    before = logprobs(role)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"not whole: {name}"):
        role.load(str(folder))
    assert (logprobs(role) == before).all()


def test_a_file_that_was_cut_is_refused(saved: tuple[Any, Path]) -> None:
    role, folder = saved
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp has {len(data) - 1} bytes, of {len(data)}"):
        role.load(str(folder))


def test_metadata_that_is_rubbish_is_refused(saved: tuple[Any, Path]) -> None:
    role, folder = saved
    (folder / "common.pt").write_bytes(b"\x80rubbish")
    with pytest.raises(CheckpointError, match=r"not whole: common\.pt cannot be read"):
        role.load(str(folder))
    (folder / ".metadata").write_bytes(b"\x80rubbish")
    with pytest.raises(CheckpointError, match=r"not whole: \.metadata cannot be read"):
        role.load(str(folder))


def test_another_model_is_refused_and_what_differs_is_named(
    start: Start, saved: tuple[Any, Path], folder: Path
) -> None:
    if not (folder / "deeper").exists():
        make_checkpoint(folder / "deeper", "qwen3", tied=True, num_hidden_layers=4)
    role = start("deeper")
    with pytest.raises(CheckpointError, match=r"model\.num_hidden_layers is 2 in it, and 4 here"):
        role.load(str(saved[1]))


def test_another_precision_is_refused_but_for_weights_alone(start: Start, saved: tuple[Any, Path]) -> None:
    role = start(dtype="bfloat16")
    with pytest.raises(CheckpointError, match="dtype is float32 in it, and bfloat16 here"):
        role.load(str(saved[1]))
    role.load(str(saved[1]), weights_only=True)


def test_it_is_saved_and_loaded_where_model_and_optimizer_are(start: Start, tmp_path: Path) -> None:
    role = start()
    role.offload(model=False, optimizer=True)
    with pytest.raises(TurnError, match="optimizer"):
        role.save(str(tmp_path))
    with pytest.raises(TurnError, match="optimizer"):
        role.load(str(tmp_path))


# ----- writes that fail -----


def test_a_write_that_fails_is_told_and_the_next_one_succeeds(start: Start, tmp_path: Path) -> None:
    check_that_a_full_disk_costs_one_save(start(**SETTINGS), tmp_path)


def test_a_folder_that_is_not_there_and_a_second_save_are_refused(start: Start, tmp_path: Path) -> None:
    role = start()
    with pytest.raises(CheckpointError, match=r"no folder .*gone here; output_dir has to be storage that all nodes"):
        role.save(str(tmp_path / "gone"))
    role.save(str(tmp_path))
    with pytest.raises(CheckpointError, match="a save is running"):
        role.save(str(tmp_path))
    role.finish_save()


def test_a_folder_that_vanished_is_told(start: Start, tmp_path: Path) -> None:
    role = start()
    folder = tmp_path / "saved"
    folder.mkdir()
    role.save(str(folder))
    while role.is_saving():
        time.sleep(0.01)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="not complete: rank 0: No such file or directory"):
        role.finish_save()


def test_a_folder_of_hugging_face_that_cannot_be_written_is_told(start: Start, tmp_path: Path) -> None:
    role = start()
    with (
        small_files(50_000),
        pytest.raises(CheckpointError, match=r"out was not written: rank 0: .*(File too large|code: 27)"),
    ):
        role.export_hf(str(tmp_path / "out"))
    role.export_hf(str(tmp_path / "out"))
