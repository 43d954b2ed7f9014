"""Every command that the README and the examples show works as shown."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolegraph import cli
from rolegraph.telemetry import read_metrics
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
    return [
        command for command in commands("run") if "output_dir=" in command and command not in (*evaluated(), going_on())
    ]


def going_on() -> str:
    """The command that is given again when its run was killed."""
    (command,) = (command for command in commands("run") if "resume=auto" in command)
    return command


def evaluated() -> list[str]:
    """The command of a run that is evaluated while it trains."""
    return [command for command in commands("run") if " eval=" in command]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command", [each for each in commands("run") if each not in (*chain(), *evaluated(), going_on())]
)
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


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_run_is_evaluated_and_its_checkpoint_alone_gives_the_same(tmp_path: Path) -> None:
    """As shown, but for the sizes: the weights of the last evaluation in the run are those of its checkpoint."""
    ((train,), (alone,)) = evaluated(), commands("eval")
    sizes = (
        "data.size=200",
        "algorithm.global_batch_size=32",
        "algorithm.num_generations=4",
        "rollout.max_num_seqs=64",
    )
    steps = ("max_steps=2", "algorithm.warm_start.max_steps=20", "checkpoint.every=22", "eval.every=2")
    sets = ("eval.sets.arithmetic.data.size=24", "eval.sets.longer.data.size=8")
    held = ("eval.sets.held.loss=true", "eval.sets.held.data.size=16", "eval.sets.held.data.seed=5000")
    done = rolegraph(*shlex.split(train)[1:], *sizes, *steps, *sets, *held, cwd=tmp_path)
    folder = tmp_path / "outputs/evaluated"
    assert done.returncode == 0, done.stdout + logs(folder)
    found = [row for row in read_metrics(folder / "metrics.jsonl") if "eval/held/loss" in row]
    assert [(row["step"], row["stage"]) for row in found] == [(20, "eval"), (22, "grpo")]
    ended = found[-1]
    assert ended["weight_version"] == 2, "evaluations count no version"
    assert {"eval/longer/pass@1", "eval/longer/pass@8", "eval/arithmetic/pass@1", "seconds/eval"} <= ended.keys()
    assert "arithmetic/pass@1" in done.stdout
    before = {path.parent.name for path in (folder / "eval").glob("*/step-20.parquet")}
    assert before == {"arithmetic", "longer"}, "a loss has no answers"

    done = rolegraph(*shlex.split(alone)[1:], sets[0], "output_dir=outputs/alone", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + logs(tmp_path / "outputs/alone")
    results = json.loads((tmp_path / "outputs/alone/results.json").read_text())["sets"]
    assert results["held"]["loss"] == pytest.approx(ended["eval/held/loss"], abs=1e-5)
    columns = ["uid", "repeat", "response_text", "passed"]
    for name in ("arithmetic", "longer"):
        one = pq.read_table(folder / f"eval/{name}/step-22.parquet", columns=columns)
        assert one.equals(pq.read_table(tmp_path / f"outputs/alone/eval/{name}/step-0.parquet", columns=columns)), name
    assert not list((tmp_path / "outputs/alone").glob(".model*")), "the exported weights are gone"


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
