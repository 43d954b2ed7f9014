"""Counting the steps that the trainer skipped, and keeping their rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolegraph.algorithms.config import GKDConfig, GRPOConfig, SFTConfig
from rolegraph.algorithms.gkd import GKD
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.algorithms.sft import SFT
from rolegraph.bad_steps import BadSteps
from rolegraph.errors import BadStepsError
from rolegraph.interfaces import Metrics
from tests.rolegraph.algorithms.fakes import World
from tests.rolegraph.fakes import batch_of


class Taken:
    """An algorithm that has taken steps, as far as a hook sees one."""

    def __init__(self, hook: BadSteps) -> None:
        self.hook = hook
        self.events: list[str] = []
        self.lines: list[dict[str, float]] = []
        self.job = self

    @property
    def telemetry(self) -> Any:
        return SimpleNamespace(in_log=lambda number: number, event=self.events.append)

    async def step(self, *, bad: bool | None, seed: int = 0) -> dict[str, float]:
        """Null: there was nothing to train on."""
        metrics: Metrics = {"step/left_out": 1.0} if bad is None else {"loss": 0.5, "skipped": float(bad)}
        number = len(self.lines) + 1
        step = Step("grpo", number, 10, metrics=metrics, batch=batch_of(4, seed=seed))
        line = metrics | await self.hook.stepped(self, step)  # type: ignore[arg-type]
        self.lines.append(line)
        await self.hook.logged(self, step)  # type: ignore[arg-type]
        return line


async def test_bad_steps_are_counted_told_and_their_rows_kept(tmp_path: Path) -> None:
    taken = Taken(BadSteps(3, tmp_path, use_ray=False))
    for bad in (False, True, False, True, True, False):
        await taken.step(bad=bad, seed=len(taken.lines))
    assert [line.get("bad_steps") for line in taken.lines] == [None, 1.0, None, 2.0, 3.0, None]
    assert len(taken.events) == 3
    assert taken.events[2].startswith("step 5 is bad and was skipped: its loss or gradients are not finite (2 in a row")
    assert {path.name for path in (tmp_path / "bad_steps").iterdir()} == {f"step-{n}.parquet" for n in (2, 4, 5)}
    kept = pq.read_table(tmp_path / "bad_steps" / "step-4.parquet")
    assert kept.to_pylist() == batch_of(4, seed=3).table.to_pylist()


async def test_too_many_in_a_row_end_the_run_and_the_error_says_where_the_rows_are(tmp_path: Path) -> None:
    taken = Taken(BadSteps(2, tmp_path, use_ray=False))
    await taken.step(bad=True)
    await taken.step(bad=False)
    await taken.step(bad=True)
    with pytest.raises(BadStepsError, match=r"the last 2 steps \(up to step 4\).*max_bad_steps=2") as caught:
        await taken.step(bad=True)
    assert f"their rows are in {tmp_path / 'bad_steps'}" in str(caught.value)
    assert len(taken.lines) == 4, "the last one is in the log"


async def test_a_step_without_rows_is_neither_bad_nor_good(tmp_path: Path) -> None:
    taken = Taken(BadSteps(2, tmp_path, use_ray=False))
    await taken.step(bad=True)
    assert "bad_steps" not in await taken.step(bad=None)
    with pytest.raises(BadStepsError, match="the last 2 steps"):
        await taken.step(bad=True)


async def test_rows_that_could_not_be_saved_are_told_and_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad_steps").write_text("in the way")
    taken = Taken(BadSteps(2, tmp_path, use_ray=False))
    await taken.step(bad=True)
    await taken.step(bad=False)
    assert any("rows of a bad step were not saved" in event for event in taken.events)
    await taken.step(bad=True)
    with pytest.raises(BadStepsError, match="some rows were not saved"):
        await taken.step(bad=True)


async def test_the_count_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    taken = Taken(BadSteps(2, tmp_path, use_ray=False))
    await taken.step(bad=True)
    again = Taken(BadSteps(2, tmp_path, use_ray=False))
    again.hook.restore(taken.hook.state())
    with pytest.raises(BadStepsError):
        await again.step(bad=True)


class Seen(Hook):
    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    async def stepped(self, algorithm: Any, step: Step) -> Metrics:
        assert step.batch is not None
        self.rows.append(step.batch["uid"].to_pylist())
        return {}


@pytest.mark.parametrize(
    ("algorithm", "config", "more"),
    [
        (SFT, SFTConfig(global_batch_size=3), {}),
        (GRPO, GRPOConfig(global_batch_size=4, num_generations=2), {"rewards": [[0.0, 1.0, 0.0, 1.0]]}),
        (GKD, GKDConfig(global_batch_size=2, gkd_logits_topk=2), {"teachers": ["teacher"], "rewards": [[0.0, 1.0]]}),
    ],
)
async def test_every_algorithm_tells_the_rows_of_its_steps(algorithm: Any, config: Any, more: dict[str, Any]) -> None:
    world = World(algorithm, config, max_steps=2, **more)
    seen = Seen()
    world.algorithm.job.hooks = (seen,)
    await world.run()
    assert seen.rows == world.trained("uid")
    assert len(seen.rows) == 2
    assert world.algorithm.at.batch is None, "it is not kept"
