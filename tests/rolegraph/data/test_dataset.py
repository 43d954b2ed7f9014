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


@given(size=st.integers(1, 12), more=st.integers(0, 20), seed=st.integers(0, 5), shuffle=st.booleans())
def test_every_epoch_has_every_row_once_and_no_batch_has_one_twice(
    size: int, more: int, seed: int, shuffle: bool
) -> None:
    rows = size + more
    drawn = _draw(Batches(_rows(rows), size, seed, shuffle=shuffle), 3 * rows)
    assert all(len(set(batch)) == len(batch) == size for batch in drawn)
    flat = [uid for batch in drawn for uid in batch]
    for start in range(0, len(flat) - rows + 1, rows):
        assert len(set(flat[start : start + rows])) == rows


@given(size=st.integers(1, 8), more=st.integers(0, 12), before=st.integers(0, 12))
def test_a_restored_iterator_goes_on_as_the_first_would(size: int, more: int, before: int) -> None:
    rows = size + more
    first = Batches(_rows(rows), size, 1)
    _draw(first, before)
    state = json.loads(json.dumps(first.state()))
    second = Batches(_rows(rows), size, 1)
    second.restore(state)
    expected = _draw(first, 4)
    assert _draw(second, 4) == expected
    assert _draw(Batches(_rows(rows), size, 1, start=before * size), 4) == expected


def test_an_epoch_begun_with_batches_of_another_size_ends_with_its_own_rows() -> None:
    first = Batches(_rows(7), 5, 1)
    begun = _draw(first, 2)[1][2:]  # 7 = 5 + 2: the second batch has three rows of the second epoch
    second = Batches(_rows(7), 2, 1)
    second.restore(first.state())
    assert sorted(begun + [uid for batch in _draw(second, 2) for uid in batch]) == _rows(7)["uid"].to_pylist()


def test_fewer_rows_than_a_batch_is_an_error_with_both_numbers_and_the_keys() -> None:
    with pytest.raises(DataError, match=r"takes 4 rows.*has 3.*global_batch_size.*num_generations.*data\.size"):
        Dataset(_rows(3), Report()).batches(4, seed=0)


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
