"""The order in which rows are drawn: endless, seeded, complete in each epoch, resumable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.batch import Batch
from rolegraph.data.dataset import Batches, Dataset
from rolegraph.data.report import Report
from rolegraph.errors import DataError


def _rows(count: int) -> Batch:
    return Batch.from_columns({"uid": [f"row{i}" for i in range(count)]})


def _draw(batches: Batches, count: int) -> list[list[str]]:
    return [next(batches)["uid"].to_pylist() for _ in range(count)]


@given(rows=st.integers(1, 20), size=st.integers(1, 25), seed=st.integers(0, 5), shuffle=st.booleans())
def test_every_epoch_has_every_row_once(rows: int, size: int, seed: int, shuffle: bool) -> None:
    drawn = _draw(Batches(_rows(rows), size, seed, shuffle=shuffle), 3 * rows)
    assert all(len(batch) == size for batch in drawn)
    flat = [uid for batch in drawn for uid in batch]
    for start in range(0, len(flat) - rows + 1, rows):
        assert len(set(flat[start : start + rows])) == rows


@given(rows=st.integers(1, 12), size=st.integers(1, 15), before=st.integers(0, 6))
def test_a_restored_iterator_goes_on_as_the_first_would(rows: int, size: int, before: int) -> None:
    first = Batches(_rows(rows), size, 1)
    _draw(first, before)
    state = json.loads(json.dumps(first.state()))
    second = Batches(_rows(rows), size, 1)
    second.restore(state)
    expected = _draw(first, 4)
    assert _draw(second, 4) == expected
    assert _draw(Batches(_rows(rows), size, 1, start=before * size), 4) == expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    data = Dataset(_rows(50), Report())
    one, two = _draw(data.batches(50, seed=0), 2)
    assert one != two
    assert _draw(data.batches(50, seed=0), 1) == [one]
    assert _draw(data.batches(50, seed=1), 1) != [one]
    assert _draw(Dataset(_rows(3), Report(), shuffle=False).batches(3, seed=7), 1) == [["row0", "row1", "row2"]]


@pytest.mark.parametrize(("rows", "seed", "key"), [(4, 0, "rows"), (3, 1, "seed")])
def test_a_state_of_other_data_is_refused(rows: int, seed: int, key: str) -> None:
    with pytest.raises(DataError, match=f"{key} was"):
        Batches(_rows(rows), 2, seed).restore(Batches(_rows(3), 2, 0).state())


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        Batches(_rows(0), 2, 0)
