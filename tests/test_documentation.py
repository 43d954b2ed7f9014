"""Every command that the README and the examples show works as shown."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from rolegraph import cli
from tests.runs import SMALL, logs, rolegraph, run

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md")))


def commands(kind: str) -> list[str]:
    """The indented `rolegraph KIND ...` lines of all pages, each once, without those shown to fail."""
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    found = [line.strip() for line in lines if re.match(rf" +rolegraph {kind} ", line)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands("plan"))
def test_plans_of_the_pages(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = cli.dispatch(shlex.split(command)[1:])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "Placement" in shown.out


def chain() -> list[str]:
    """The two commands by which the README goes from sampling to training."""
    return [command for command in commands("run") if "output_dir=" in command]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [command for command in commands("run") if command not in chain()])
def test_runs_of_the_pages(command: str, tmp_path: Path) -> None:
    done = run(*shlex.split(command)[2:], *SMALL, folder=tmp_path)
    assert len(done.metrics) == 3, done.output + logs(tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_chain_from_sampling_to_training(tmp_path: Path) -> None:
    """As shown, but for the sizes: the real model samples, and is trained on what was kept."""
    sample, train = chain()
    small = ("data.size=12", "algorithm.num_sampling_batch_size=6", "algorithm.max_completion_length=24")
    done = rolegraph(*shlex.split(sample)[1:], *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + logs(tmp_path / "outputs/sampled")
    kept = (tmp_path / "outputs/sampled/kept.jsonl").read_text().splitlines()
    assert 0 < len(kept) <= 24
    assert re.search(rf"responses kept +{len(kept)}$", done.stdout, flags=re.MULTILINE), done.stdout
    done = rolegraph(*shlex.split(train)[1:], "max_steps=1", "algorithm.global_batch_size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + logs(tmp_path / "outputs/trained")
    assert f"data: {len(kept)} of {len(kept)} rows kept from jsonl" in done.stdout


def test_the_fault_that_the_readme_shows() -> None:
    page = (ROOT / "README.md").read_text()
    shown = re.search(r"    \$ (rolegraph run .*)\n((?:    .*\n)+)", page)
    assert shown is not None
    done = rolegraph(*shlex.split(shown[1])[1:], cwd=ROOT)
    assert done.returncode == 2
    message = [line.strip() for line in shown[2].splitlines()]
    assert message == [line.strip() for line in done.stdout.splitlines()][: len(message)]


def test_the_pages_have_commands_of_each_kind() -> None:
    assert len(commands("plan")) >= 4
    assert len(commands("run")) >= 4
    assert len(chain()) == 2
