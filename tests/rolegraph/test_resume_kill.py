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
