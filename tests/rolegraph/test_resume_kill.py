"""Whole runs that are killed again and again, during saves too: they go on as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolegraph.checkpoints import folder as checkpoints
from tests.rolegraph.lasting.runs import GKD, GRPO, begin, figures, finish, rows, said_by, steps_of, wait_for

STEPS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def kill_at_random(folder: Path, draw: random.Random, *words: str) -> str:
    """Kill -9 while it starts, or some steps later, or while it writes a checkpoint; returns which of these."""
    moment = draw.choice(["starting", "a step", "a save", "a later save", "a later save"])
    process, done, before = begin(folder, *words), steps_of(folder), newest_step(folder)
    if moment == "starting":
        time.sleep(draw.uniform(0.0, 1.5))
    elif moment == "a step":
        wanted = draw.randrange(1, 8)
        wait_for(lambda: steps_of(folder) != done, process)  # it goes back to the checkpoint, or on from none
        wait_for(lambda: steps_of(folder) >= before + wanted, process)
        time.sleep(draw.uniform(0, 0.02))
    else:
        wait_for(lambda: newest_step(folder) > before or moment == "a save", process)
        wait_for(lambda: bool(checkpoints.partial(folder)), process)
        time.sleep(draw.uniform(0, 0.2))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, said_by(folder).read_text()[-3000:]
    return moment


def newest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0 where there is none."""
    there = checkpoints.newest(folder)
    return there.step if there is not None else 0


@pytest.mark.parametrize(("algorithm", "kills"), [(GRPO, 10), (GKD, 6)], ids=["grpo", "gkd"])
def test_a_run_that_is_killed_again_and_again_equals_one_that_was_not(
    algorithm: tuple[str, ...], kills: int, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"moments of {seed}")
    draw, folder, whole = random.Random(seed), tmp_path / "killed", tmp_path / "whole"
    slow = ("train.seconds=0.02", "train.save_seconds=0.03")
    words = (*algorithm, f"data.path={rows(tmp_path / 'rows.jsonl')}", f"max_steps={STEPS}", *slow)
    code, output = finish(whole, *words)
    assert code == 0, output[-3000:]
    moments, newest = [], 0
    for _ in range(kills):
        moments.append(kill_at_random(folder, draw, *words, "resume=auto"))
        assert newest_step(folder) >= newest, "a checkpoint that was there is there"
        newest = newest_step(folder)
        assert all(each.verify() == [] for each in checkpoints.listed(folder))
    print(moments, newest)
    code, output = finish(folder, *words, "resume=auto")
    assert code == 0, output[-3000:]
    assert newest > 0
    assert f"going on behind step {newest}, from" in output
    assert len(figures(whole)) == 5 + STEPS
    assert figures(folder) == figures(whole)
    saved = [sorted(path.name for path in run.glob("samples/*")) for run in (folder, whole)]
    assert set(saved[1]) <= set(saved[0])
    for name in saved[1]:
        assert pq.read_table(folder / "samples" / name).equals(pq.read_table(whole / "samples" / name))
    assert [each.step for each in checkpoints.listed(folder)] == [each.step for each in checkpoints.listed(whole)]
    assert checkpoints.partial(folder) == []
    code, output = finish(folder, *words, "resume=true")
    assert code == 0, output
    assert f"finished already: {STEPS} of {STEPS}" in output


def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint_behind_its_step(tmp_path: Path) -> None:
    words = (*GRPO, f"data.path={rows(tmp_path / 'rows.jsonl')}", "max_steps=12", "train.seconds=0.05")
    rare = (*words, "checkpoint.every=1000")
    code, output = finish(tmp_path / "whole", *words)
    assert code == 0, output[-3000:]
    folder = tmp_path / "stopped"
    process = begin(folder, *rare)
    wait_for(lambda: steps_of(folder) >= 8, process)
    process.terminate()
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM, said_by(folder).read_text()[-3000:]
    step = newest_step(folder)
    assert step == steps_of(folder) < 17
    said = said_by(folder).read_text()
    assert "SIGTERM: the run stops behind this step, with a checkpoint" in said
    assert f"rolegraph: stopped by SIGTERM: go on behind step {step} with resume=auto" in said
    code, output = finish(folder, *rare, "resume=auto")
    assert code == 0, output[-3000:]
    assert figures(folder) == figures(tmp_path / "whole")


def test_a_run_begins_in_a_new_folder_from_a_checkpoint_of_another_and_others_are_refused(tmp_path: Path) -> None:
    words = (*GRPO, f"data.path={rows(tmp_path / 'rows.jsonl')}", "checkpoint.keep_last=null", "max_steps=7")
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    assert finish(whole, *words)[0] == 0
    early = checkpoints.folder_of(whole, 6)
    code, output = finish(branch, *words, f"resume={early}")
    assert code == 0, output[-3000:]
    assert figures(branch) == figures(whole)[6:]
    for changed, message in (
        (["algorithm.beta=0.2", "seed=4"], "algorithm.beta was 0.1, and is 0.2\n  seed was 0, and is 4"),
        (["data.limit=13"], "data.limit was null, and is 13"),
        (["max_steps=8"], "train.lr_schedule=linear ends: set train.decay_steps=7"),
    ):
        code, output = finish(branch, *words, *changed, "resume=true")
        assert code == 2, output
        assert message in output
    others = f"data.path={rows(tmp_path / 'more.jsonl', 15)}"
    code, output = finish(tmp_path / "third", *words, others, f"resume={early}")
    assert code == 1, output
    assert "data had 14 rows, and has 15" in output
    kept = (branch / "config.yaml").read_text()
    code, output = finish(branch, *words, others, "resume=true", "max_steps=9", "train.decay_steps=7")
    assert code == 1, output
    assert (branch / "config.yaml").read_text() == kept, "what is refused leaves the config of the run"
    (tmp_path / "third" / "config.yaml").write_text(kept)
    code, output = finish(tmp_path / "third", *words, "resume=auto")
    assert code == 0, output[-3000:]
    assert f"going on behind step 6, from {early}" in output, "it began from there"
