"""GRPO with rewards from several roles, with the real engines: functions of steps beside functions of responses."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest

from rolegraph.telemetry.timeline import spans
from tests.runs import SMALL, Finished, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLUGIN = """
def long_steps(steps):
    return [[len(step) / 10 for step in each] for each in steps]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("rewards")
    plugin = folder / "long_steps_plugin.py"
    plugin.write_text(PLUGIN)
    return run(
        *("algorithm=grpo", "model=tiny", "max_steps=2", "logger.samples_every=1", *SMALL),
        *("prm=functions", "prm.reward_funcs=[long_steps_plugin.long_steps]", f"prm.external_plugins=[{plugin}]"),
        *('prm.step_separator="1"', "algorithm.prm_reward=per_step"),
        *("+orm@orm_exact=functions", "orm_exact.reward={reward_funcs: [reasoning_gym]}"),
        "algorithm.score_weights={prm: 0.5, orm_exact: 3}",
        folder=folder / "run",
    )


def rows_of(finished: Finished) -> list[dict[str, Any]]:
    files = [finished.folder / "samples" / f"step-{step}.parquet" for step in (1, 2)]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_every_role_has_its_columns_and_the_sum_its_weights(finished: Finished) -> None:
    rows = rows_of(finished)
    assert len(rows) == 64
    for row in rows:
        assert row["scores/orm"] == row["rewards/reasoning_gym"]
        assert row["scores/orm_exact"] == row["rewards/orm_exact/reasoning_gym"] == row["scores/orm"]
        assert row["reward"] == 4 * row["scores/orm"], "steps have no part in it"
        assert row["scores/prm"] == row["prm_score"] == min(row["step_scores"], default=None)
        assert (row["prm_fault"] is None) == bool(row["step_scores"]), "a response may have no step, and says so"
        assert row["step_ends"][-1:] in ([], [row["response_length"]])
        assert len(row["step_ends"]) == len(row["step_scores"])
    assert max(len(row["step_scores"]) for row in rows) > 1


def test_steps_train_where_rows_say_nothing(finished: Finished) -> None:
    quiet = [row for row in finished.metrics if row["reward/std"] == 0]
    assert quiet, "a tiny model gets every answer wrong"
    for row in quiet:
        assert row["grad_norm"] > 0
        assert row["scores/prm/mean"] > 0


def test_the_driver_holds_no_step_either(finished: Finished) -> None:
    assert finished.held_bytes == 0
    assert finished.output.rstrip().endswith("False"), "torch was imported in the driver"


def test_reward_roles_work_side_by_side(finished: Finished) -> None:
    every = spans(finished.folder / "timeline.json")
    calls = [span for span in every if span["name"] == "score" and span["role"] != "driver"]
    phases = [span for span in every if span["name"] == "score" and span["role"] == "driver"]
    assert len(phases) == 2, "one a generation"
    for phase in phases:
        own = [call for call in calls if phase["start"] <= call["start"] <= phase["end"]]
        assert {call["role"] for call in own} == {"orm", "orm_exact", "prm"}
        last_to_begin = max(min(call["start"] for call in own if call["role"] == each["role"]) for each in own)
        first_to_end = min(max(call["end"] for call in own if call["role"] == each["role"]) for each in own)
        assert last_to_begin < first_to_end, "all of them had begun before any had ended"
