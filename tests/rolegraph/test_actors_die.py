"""Whole runs whose actors are killed in the middle of their calls: they end as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rolegraph.cli import dispatch
from rolegraph.telemetry import read_metrics
from tests.rolegraph.lasting.runs import figures, rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

KINDS = {"train": "Train", "rollout": "Rollout", "teacher": "Teacher", "orm": "ORM"}
STEPS = 12
WORDS = (
    *("algorithm=gkd", "train=mortal", "rollout=mortal", "teacher=mortal", "orm=mortal", "reward=null"),
    *("placement=separate", "placement.device=cpu", "data=jsonl", "deterministic=true", f"max_steps={STEPS}"),
    *("algorithm.global_batch_size=4", "algorithm.max_completion_length=6", "algorithm.lmbda=0.5"),
    *("algorithm.gkd_logits_topk=2", "algorithm.warm_start={max_steps: 3, lr: 0.5}", "logger.samples_every=0"),
)


def configs(folder: Path) -> Path:
    for role, kind in KINDS.items():
        (folder / role).mkdir(parents=True)
        (folder / role / "mortal.yaml").write_text(f"_target_: tests.rolegraph.mortal_roles.Mortal{kind}\n")
    return folder


def run(folder: Path, *words: str) -> Any:
    """The exit code of a run in a thread of this process, which is connected to Ray."""
    codes: list[int] = []
    thread = Thread(target=lambda: codes.append(dispatch(["run", *WORDS, *words, f"output_dir={folder}"])))
    thread.start()
    thread.join(200)
    return codes[0] if codes else "it hangs"


def test_every_kind_of_actor_dies_and_the_numbers_are_those_of_a_run_where_none_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ("--config-dir", str(configs(tmp_path / "conf")), f"data.path={rows(tmp_path / 'rows.jsonl')}")
    deaths = ("train.dies=11", "rollout.dies=2", "teacher.dies=4", "orm.dies=1")
    killed = ("train.ranks=2", "checkpoint.every=2", *deaths, "ray_exp_name=mortals")
    assert run(tmp_path / "killed", *common, *killed) == 0, capfd.readouterr().err[-4000:]
    said = " ".join(capfd.readouterr().err.split())
    for role in KINDS:
        assert (tmp_path / "killed" / f"died-{role}").exists()
        rank = int(role == "train")
        assert f"{role} rank {rank} died: " in said
    # That of step 10 may be half written.
    assert re.search(r"the train group is started again \(restart 1 of 3\), and goes on behind step (8|10) ", said)
    assert "works again after" in said
    assert run(tmp_path / "whole", *common, "train.ranks=2", "ray_exp_name=immortals") == 0
    lines = figures(tmp_path / "killed")
    restarts = {key: line.pop(key) for line in lines for key in list(line) if key.startswith("restarts/")}
    assert restarts == {f"restarts/{role}": 1.0 for role in KINDS}
    assert len(lines) == 3 + STEPS
    assert lines == figures(tmp_path / "whole")
    assert read_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]["step"] == 3 + STEPS


def test_a_rank_that_fails_in_a_save_leaves_no_other_waiting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolegraph.rebuild.STRAGGLE_S", 1.0)
    common = ("--config-dir", str(configs(tmp_path / "conf")), f"data.path={rows(tmp_path / 'rows.jsonl')}")
    words = ("train.ranks=2", "checkpoint.every=2", "train.fails_save=4", "max_steps=4", "ray_exp_name=apart")
    assert run(tmp_path / "apart", *common, *words) == 0, capfd.readouterr().err[-4000:]
    said = " ".join(capfd.readouterr().err.split())
    assert "train: ranks 1 still wait for one that has failed, and are ended" in said
    assert "the checkpoint of step 4 was not written" in said
    assert "no host memory for a copy" in said
    assert "the train group is started again (restart 1 of 3), and goes on behind step 2" in said
    assert [line["step"] for line in figures(tmp_path / "apart")] == list(range(1, 8))


def test_without_checkpoints_the_death_of_a_rank_ends_the_run_with_its_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ("--config-dir", str(configs(tmp_path / "conf")), f"data.path={rows(tmp_path / 'rows.jsonl')}")
    assert run(tmp_path / "killed", *common, "train.ranks=2", "train.dies=2", "ray_exp_name=mortals") == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "role train rank 1" in said
    assert "the actor died" in said
