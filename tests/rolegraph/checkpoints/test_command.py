"""`rolegraph checkpoints`: what it shows, verifies and removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolegraph import cli
from rolegraph.checkpoints import folder
from rolegraph.results import alone_in
from tests.rolegraph.checkpoints.test_folder import half, make, steps


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step, value in ((5, 0.9), (10, 0.2), (15, 0.4)):
        make(tmp_path, step, **{"reward/mean": value})
    half(tmp_path, 20)
    return tmp_path


def test_a_table_of_what_there_is(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run_dir, run_dir / "checkpoints"):
        assert cli.dispatch(["checkpoints", str(path)]) == 0
        head, names, *rows = capsys.readouterr().out.splitlines()
        assert head == f"{run_dir / 'checkpoints'}: 3 whole, 1 not"
        assert names.split() == ["step", "saved", "size", "reward/mean", "whole", "hf"]
        assert [row.split()[0] for row in rows] == ["5", "10", "15", "20"]
        assert rows[0].split()[-3:] == ["0.9", "yes", "-"]
        assert rows[3].split()[-2:] == ["no", "-"]


def test_verifying_one_or_all(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["checkpoints", str(run_dir), "--verify"]) == 0
    assert "verified: 3 with all files as they were written" in capsys.readouterr().out
    (folder.folder_of(run_dir, 10) / "config.yaml").write_text("seed: 2\n")
    assert cli.dispatch(["checkpoints", str(run_dir), "--verify"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "step 10: config.yaml: has changed"
    assert cli.dispatch(["checkpoints", str(folder.folder_of(run_dir, 5)), "--verify"]) == 0
    assert "verified: 1 with" in capsys.readouterr().out


def test_pruning(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoints", str(run_dir), "--prune", "--keep-last", "1", "--keep-best", "1", "--metric", "reward/mean"]
    assert cli.dispatch(words) == 0
    said = capsys.readouterr().out
    assert f"removed {folder.folder_of(run_dir, 20)}, which was not whole" in said
    assert f"removed {folder.folder_of(run_dir, 10)}, " in said
    assert steps(run_dir) == [5, 15]
    assert folder.partial(run_dir) == []


def test_a_run_that_goes_on_is_not_pruned(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from rolegraph.results import alone_in\n"
        f"with alone_in(Path({str(run_dir)!r})):\n    print('here', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        assert cli.dispatch(["checkpoints", str(run_dir), "--prune", "--keep-last", "1"]) == 2
        other.kill()
    assert "is being written by a run that still goes on" in capsys.readouterr().err
    assert steps(run_dir) == [5, 10, 15]
    with alone_in(run_dir):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is no folder: name the folder of a run"),
        ([".", "--prune"], "--prune needs to know how many stay: add --keep-last N"),
        ([".", "--keep-last", "2"], "--keep-last is for --prune: add it"),
        ([".", "--prune", "--keep-last", "0"], "--keep-last 0 keeps nothing to go on from"),
        ([".", "--prune", "--keep-last", "1", "--keep-best", "1"], "--keep-best needs a metric to compare by"),
        ([".", "--prune", "--keep-last", "1", "--best", "min"], "--best has no effect without --keep-best N"),
        ([".", "--prune", "--keep-last", "1", "--keep-best", "-1"], "--keep-best -1 says nothing: give 1 or more"),
        (
            [".", "--prune", "--keep-last", "1", "--keep-best", "1", "--metric", "rewards/mean"],
            "--metric rewards/mean: no checkpoint has it; did you mean reward/mean?",
        ),
        ([".", "--metric", "x"], "--metric x: no checkpoint has it; they have reward/mean"),
        (
            ["checkpoints/step-10", "--prune", "--keep-last", "1"],
            "checkpoints/step-10 is one of them: name the run",
        ),
        ([".", "--purge"], "unrecognized arguments: --purge; `rolegraph checkpoints --help` lists the options"),
    ],
)
def test_options_that_say_nothing_are_refused(
    words: list[str], message: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir)
    assert cli.dispatch(["checkpoints", *words]) in (1, 2)
    assert message in capsys.readouterr().err
    assert steps(run_dir) == [5, 10, 15]


def test_one_whose_marker_cannot_be_read_is_named_and_stays(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.folder_of(run_dir, 10) / folder.MARKER).write_text("{")
    assert cli.dispatch(["checkpoints", str(run_dir), "--prune", "--keep-last", "1"]) == 0
    assert "step-10/complete.json cannot be read" in capsys.readouterr().out
    assert folder.folder_of(run_dir, 10).is_dir()
    assert steps(run_dir) == [15]
    assert cli.dispatch(["checkpoints", str(run_dir), "--verify"]) == 1
