"""What changes the hash of a data set's columns, and what does not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from rolegraph.data.content import content_hash

ROWS: dict[str, list[Any]] = {
    "uid": ["a", "b", "c"],
    "prompt_ids": [[1, 2], [3], []],
    "answer": ["one", None, ""],
    "messages": [[{"role": "user", "content": "x"}], None, []],
    "level": [1.5, None, 0.0],
    "hard": [True, False, None],
    "n": [1, None, 0],
}


def of(**changes: list[Any]) -> str:
    return content_hash(pa.table({**ROWS, **changes}))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("uid", ["a", "b", "d"]),
        ("prompt_ids", [[1, 2], [4], []]),
        ("prompt_ids", [[1], [2, 3], []]),
        ("prompt_ids", [[1, 2], [3], None]),
        ("answer", ["one", "", None]),
        ("answer", ["on", None, "e"]),
        ("messages", [[{"role": "user", "content": "y"}], None, []]),
        ("messages", [[{"role": "user", "content": "x"}], [], None]),
        ("level", [1.5, 0.0, None]),
        ("hard", [True, None, False]),
        ("n", [1, 0, None]),
        ("more", [1, 2, 3]),
    ],
)
def test_every_value_counts(column: str, values: list[Any]) -> None:
    assert of(**{column: values}) != of()


def test_the_layout_of_the_buffers_does_not() -> None:
    whole = pa.table(ROWS)
    twice = pa.concat_tables([whole, whole])
    assert content_hash(twice.slice(3)) == content_hash(whole)
    assert content_hash(twice.slice(2, 3)) == content_hash(twice.slice(2, 3).take([0, 1, 2]))
    assert content_hash(whole.select(sorted(whole.column_names))) == of()
    parts = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert content_hash(parts) == of()
