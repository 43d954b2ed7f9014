"""The scored steps of rows as tensors, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError
from roles.train.packing import response_tokens
from roles.train.steps import steps_of

COLUMNS: dict[str, Any] = {
    "uid": ["a", "b", "c"],
    "prompt_ids": [[1]] * 3,
    "response_ids": [[5, 6, 7], [5, 6], [5]],
    "step_scores": [[0.5, None], None, [1.0]],
    "step_ends": [[2, 3], [2], [1]],
}


def test_steps_point_at_their_last_tokens() -> None:
    steps = steps_of(Batch.from_columns(COLUMNS))
    assert steps is not None
    assert steps.scores[[0, 2]].tolist() == [0.5, 1.0]
    assert math.isnan(steps.scores[1])
    assert steps.row.tolist() == [0, 0, 2]
    assert steps.last.tolist() == [1, 2, 5]


def test_a_step_without_tokens_points_at_none() -> None:
    scores = {"step_scores": [[0.5, 0.25, 1.0], [1.0, 0.0], None], "step_ends": [[2, 2, 3], [0, 2], []]}
    steps = steps_of(Batch.from_columns({**COLUMNS, **scores}))
    assert steps is not None
    assert steps.last.tolist() == [1, -1, 2, -1, 4]


def test_rows_that_nobody_scored() -> None:
    rows = Batch.from_columns({name: values for name, values in COLUMNS.items() if name != "step_scores"})
    assert steps_of(rows) is None


def test_a_slice_and_no_row() -> None:
    steps = steps_of(Batch.from_columns(COLUMNS).slice(1, 3))
    assert steps is not None
    assert (steps.scores.tolist(), steps.row.tolist(), steps.last.tolist()) == ([1.0], [1], [2])
    none = steps_of(Batch.from_columns(COLUMNS).slice(0, 0))
    assert none is not None
    assert len(none.scores) == len(none.last) == 0


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([[2, 2], [], [1]], "row a: step_ends ends at token 2 of 3 response tokens; the last step ends with the resp"),
        ([[3], [], [1]], "row a: step_ends has 1 entries for 2 step_scores"),
        ([[2, 3], [], [2]], "row c: step_ends ends at token 2 of 1 response tokens"),
        ([[-1, 3], [], [1]], r"row a: step_ends \[-1, 3\] go back"),
        ([[4, 3], [], [1]], r"row a: step_ends \[4, 3\] go back"),
    ],
)
def test_ends_that_do_not_fit_are_refused_by_uid(ends: list[list[int]], message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        steps_of(Batch.from_columns({**COLUMNS, "step_ends": ends}))


def test_steps_are_no_token_columns_even_where_each_token_is_one() -> None:
    rows = {**COLUMNS, "step_scores": [[0.5, None, 1.0], [0.0, 1.0], [1.0]], "step_ends": [[1, 2, 3], [1, 2], [1]]}
    columns = response_tokens(Batch.from_columns(rows)).columns
    assert not {"step_scores", "step_ends"} & set(columns)
