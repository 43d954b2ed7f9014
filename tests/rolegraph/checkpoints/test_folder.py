"""Which folders are checkpoints, which is the newest, and which stay."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from rolegraph.checkpoints import folder
from rolegraph.errors import CheckpointError


def make(run_dir: Path, step: int, **metrics: float) -> folder.Checkpoint:
    path = folder.begin(run_dir, step)
    (path / "config.yaml").write_text("seed: 0\n")
    (path / "driver.json").write_text(json.dumps({"step": step}))
    (path / "train" / "weights.bin").write_bytes(b"x" * 3)
    return folder.complete(path, step, metrics=metrics)


def half(run_dir: Path, step: int) -> Path:
    path = folder.begin(run_dir, step)
    (path / "train" / "weights.bin").write_bytes(b"x")
    return path


def steps(run_dir: Path) -> list[int]:
    return [each.step for each in folder.listed(run_dir)]


def test_the_newest_is_the_one_with_the_most_steps_that_is_whole(tmp_path: Path) -> None:
    assert folder.newest(tmp_path) is None
    for step in (10, 9, 100):
        make(tmp_path, step)
    half(tmp_path, 101)
    assert steps(tmp_path) == [9, 10, 100]
    found = folder.newest(tmp_path)
    assert found is not None
    assert (found.step, found.path.name, found.driver) == (100, "step-100", {"step": 100})
    assert found.size == sum(file.stat().st_size for file in found.path.rglob("*.[!j]*") if file.is_file()) + len(
        '{"step": 100}'
    )


def test_a_path_names_a_checkpoint_a_run_or_its_folder_of_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, 5)
    last = make(tmp_path, 15)
    for path in (tmp_path, tmp_path / "checkpoints", last.path):
        assert folder.resolve(path).step == 15
    assert folder.resolve(tmp_path / "checkpoints" / "step-5").step == 5
    assert folder.run_dir_of(last) == tmp_path


def test_what_is_no_checkpoint_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing is no folder: name a checkpoint \(RUN/checkpoints/step-N\)"):
        folder.resolve(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint: a run writes some with checkpoint\.every=N"):
        folder.resolve(tmp_path)
    make(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"step-7 is not whole: .*Whole are those of the steps 5$"):
        folder.resolve(half(tmp_path, 7))


@pytest.mark.parametrize("text", ['{"step": 5, "sav', "[]", "{}"])
def test_a_marker_that_cannot_be_read_is_not_taken_for_none(text: str, tmp_path: Path) -> None:
    make(tmp_path, 2)
    broken = make(tmp_path, 5)
    (broken.path / folder.MARKER).write_text(text)
    for found in (folder.newest, folder.resolve):
        with pytest.raises(
            CheckpointError, match=r"step-5/complete.json cannot be read .*: mend that, or move \S+step-5"
        ):
            found(tmp_path)
    assert len(folder.unreadable(tmp_path)) == 1
    assert folder.partial(tmp_path) == folder.remove_partial(tmp_path) == []
    make(tmp_path, 7)
    assert steps(tmp_path) == [2, 7]
    found = folder.newest(tmp_path)
    assert found is not None, "an older one is in nobody's way"
    assert found.step == 7
    assert [each.step for each in folder.prune(tmp_path, keep_last=1)] == [2]
    assert broken.path.is_dir(), "what nobody knows is not removed"


def test_a_disk_that_does_not_answer_says_nothing_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make(tmp_path, 5)
    reading = Path.read_text

    def broken(path: Path, *args: str, **more: str) -> str:
        if path.name == folder.MARKER:
            raise OSError(errno.EIO, "Input/output error")
        return reading(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(CheckpointError, match=r"cannot be read \(OSError: .*Input/output error"):
        folder.newest(tmp_path)
    assert folder.remove_partial(tmp_path) == []
    assert kept.path.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(Path, "stat", lambda path, **_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Denied")))
    assert kept.verify()[0] == "config.yaml: cannot be read: Denied"


def test_a_later_format_is_named(tmp_path: Path) -> None:
    marker = make(tmp_path, 5).path / folder.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 9}))
    with pytest.raises(CheckpointError, match="step-5 has format 9, and this version of rolegraph reads format 1"):
        folder.newest(tmp_path)


def test_half_written_ones_are_removed_and_whole_ones_stay(tmp_path: Path) -> None:
    make(tmp_path, 5)
    path = half(tmp_path, 10)
    assert folder.remove_partial(tmp_path) == [path]
    assert not path.exists()
    assert steps(tmp_path) == [5]


def test_verifying_names_every_file_that_is_not_as_it_was(tmp_path: Path) -> None:
    found = make(tmp_path, 5)
    assert found.verify() == []
    (found.path / "config.yaml").write_text("seed: 1\n")
    (found.path / "driver.json").unlink()
    (found.path / "train" / "weights.bin").write_bytes(b"xx")
    assert found.verify() == [
        "config.yaml: has changed",
        "driver.json: is missing",
        "train/weights.bin: has 2 bytes, and had 3",
    ]


def test_a_checkpoint_loses_its_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = make(tmp_path, 5)
    seen: list[list[str]] = []
    monkeypatch.setattr(
        folder.shutil, "rmtree", lambda path, **_: seen.append(sorted(each.name for each in Path(path).iterdir()))
    )
    folder.remove(found.path)
    assert seen == [["config.yaml", "driver.json", "train"]]
    assert folder.newest(tmp_path) is None


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.9), (5, 0.2)):
        make(tmp_path, step, **{"eval/sums": value})
    make(tmp_path, 6)

    def kept(**how: object) -> list[int]:
        return [each.step for each in folder.chosen(folder.listed(tmp_path), **how)]  # type: ignore[arg-type]

    assert kept(keep_last=None) == [1, 2, 3, 4, 5, 6]
    assert kept(keep_last=2) == [5, 6]
    assert kept(keep_last=1, keep_best=1, metric="eval/sums") == [4, 6]
    assert kept(keep_last=1, keep_best=2, metric="eval/sums") == [2, 4, 6]
    assert kept(keep_last=1, keep_best=1, metric="eval/sums", best="min") == [3, 6]
    assert kept(keep_last=1, keep_best=2, metric="eval/none") == [6]
    gone = folder.prune(tmp_path, keep_last=1, keep_best=1, metric="eval/sums")
    assert [each.step for each in gone] == [1, 2, 3, 5]
    assert steps(tmp_path) == [4, 6]


def test_of_several_with_the_metric_of_one_step_only_the_first_may_be_the_best(tmp_path: Path) -> None:
    def measured(step: int, at: int, value: float) -> None:
        path = folder.begin(tmp_path, step)
        folder.complete(path, step, metrics={"eval/sums": value}, measured={"eval/sums": at})

    def best(count: int, *, last: int = 1) -> list[int]:
        kept = folder.chosen(folder.listed(tmp_path), keep_last=last, keep_best=count, metric="eval/sums")
        return [each.step for each in kept][:-last]

    measured(4, 4, 0.9)
    measured(6, 4, 0.9)
    measured(8, 8, 0.5)
    measured(10, 9, 0.7)
    measured(12, 9, 0.7)
    measured(14, 9, 0.7)
    assert best(1) == [4], "and not the weights of two steps later, which nobody measured"
    assert best(2) == [4, 10]
    assert best(3) == [4, 8, 10]
