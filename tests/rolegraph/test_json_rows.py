"""Rows to JSON and back, and rows for other programs."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolegraph.errors import DataError
from rolegraph.json_rows import decode, encode, encode_plain

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["$float", "$object", "$", '"$bytes'])
offsets = st.integers(-720, 720).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | texts
    | st.binary()
    | st.datetimes(timezones=st.none() | offsets).map(lambda at: at.replace(fold=0))  # which Arrow has not
    | st.dates()
    | st.times().map(lambda at: at.replace(fold=0))
    | st.timedeltas()
    | st.decimals(allow_nan=False)
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@settings(deadline=None)
@given(st.dictionaries(texts, values, max_size=4))
def test_a_row_comes_back_as_it_was(row: dict[str, Any]) -> None:
    line = encode(row)
    assert b"\n" not in line
    again = decode(line)
    assert again == row
    assert repr(again) == repr(row)  # 1 is not True, and -0.0 is not 0.0
    json.loads(line, parse_constant=pytest.fail)  # JSON that every program reads


def test_nan_comes_back_wherever_it_is() -> None:
    row = decode(encode({"uid": "a", "scores": [1.0, math.nan, {"deep": -math.inf}]}))
    assert row["scores"][0] == 1.0
    assert math.isnan(row["scores"][1])
    assert row["scores"][2] == {"deep": -math.inf}


def test_what_arrow_gives_is_written_nanoseconds_included() -> None:
    table = pa.table(
        {
            "at": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC")),
            "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            "ragged": pa.array([[[1.0], []]]),
            "amount": pa.array([Decimal("1.20")]),
        }
    )
    (row,) = table.to_pylist()
    again = decode(encode(row))
    assert again["at"] == row["at"]
    assert again["at"].nanosecond == 789
    assert again["map"] == [["a", 1]]
    assert again["ragged"] == [[1.0], []]
    assert str(again["amount"]) == "1.20"
    (lasting,) = pa.array([1], pa.duration("ns")).to_pylist()
    with pytest.raises(DataError, match=r"column 'took' .* nanoseconds"):
        encode({"took": lasting})


def test_numbers_of_numpy_are_numbers() -> None:
    row = {"n": np.int64(3), "x": np.float64(0.5), "y": np.float32(np.nan), "ids": np.arange(3)}
    again = decode(encode(row))
    assert again["n"] == 3
    assert again["x"] == 0.5
    assert math.isnan(again["y"])
    assert again["ids"] == [0, 1, 2]


def test_other_programs_get_plain_json_and_are_told_what_is_lost() -> None:
    row = {
        "uid": "a",
        "scores": [1.0, math.nan],
        "inner": {"x": math.inf},
        "raw": b"\xff",
        "at": dt.datetime(2020, 1, 2, 3),
        "day": dt.date(2020, 1, 2),
        "took": dt.timedelta(minutes=1.5),
        "amount": Decimal("1.20"),
        "$": {"$float": "nan"},
    }
    line, lost = encode_plain(row)
    assert lost == ["scores", "inner"]
    assert json.loads(line) == {
        "uid": "a",
        "scores": [1.0, None],
        "inner": {"x": None},
        "raw": "/w==",
        "at": "2020-01-02T03:00:00",
        "day": "2020-01-02",
        "took": 90.0,
        "amount": "1.20",
        "$": {"$float": "nan"},
    }
    with pytest.raises(DataError, match="the row of uid 'a' cannot be written"):
        encode_plain({"uid": "a", "odd": object()})
