"""Results are whole, or as they were."""

from __future__ import annotations

import datetime as dt
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolegraph.data import column_types
from rolegraph.data.column_types import ColumnTypes
from rolegraph.data.columns import to_columns
from rolegraph.results import replacing, write_json, write_jsonl, write_parquet


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"uid": "old"}])

    def breaking() -> Iterator[dict[str, Any]]:
        yield {"uid": "new"}
        assert json.loads(path.read_text()) == {"uid": "old"}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_jsonl(path, breaking())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": math.nan})
    assert path.read_text() == '{"uid": "old"}\n'
    assert list(tmp_path.iterdir()) == [path]
    with replacing(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"
    write_json(path, {"x": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": "é"}


def test_values_that_json_lacks_are_counted(tmp_path: Path) -> None:
    rows = [{"uid": str(n), "score": math.nan if n else 0.5, "text": "a\u2028b"} for n in range(3)]
    assert write_jsonl(tmp_path / "rows.jsonl", rows) == {"score": 2}
    read = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [row["score"] for row in read] == [0.5, None, None]


def write(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    types = ColumnTypes(columns)
    write_jsonl(path.with_suffix(".jsonl"), types.watch(rows))
    notes = write_parquet(path, lambda: rows, types)
    path.with_suffix(".jsonl").unlink()
    return notes


class Alive(dict[str, Any]):
    """A row that counts those there are."""

    now = most = 0

    def __init__(self, number: int) -> None:
        super().__init__(uid=str(number), text="x" * 100, either={"a": number} if number % 2 else {"b": [number]})
        Alive.now += 1
        Alive.most = max(Alive.most, Alive.now)

    def __del__(self) -> None:
        Alive.now -= 1


def test_however_many_rows_there_are_few_are_held(tmp_path: Path) -> None:
    types, path = ColumnTypes(), tmp_path / "rows.parquet"
    write_jsonl(tmp_path / "rows.jsonl", types.watch(map(Alive, range(10_000))))
    write_parquet(path, lambda: map(Alive, range(10_000)), types)
    assert Alive.most < 3 * column_types.CHUNK
    assert pq.read_table(path)["uid"].to_pylist() == [str(number) for number in range(10_000)]
    assert pq.ParquetFile(path).num_row_groups == 10


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(-5, 5), st.just(2**60), st.just(2**64), st.floats(), st.text(max_size=3)),
    *(st.binary(max_size=2), st.datetimes(dt.datetime(2000, 1, 1), dt.datetime(2100, 1, 1))),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
alike = st.one_of(
    st.lists(values, max_size=6),
    *(st.lists(st.none() | kind, max_size=6) for kind in (st.integers(), st.floats() | st.integers(-5, 5))),
    st.lists(st.lists(st.integers() | st.floats(), max_size=2), max_size=6),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=2)), max_size=6),
)


@settings(deadline=None, max_examples=300)
@given(alike, st.integers(1, 4))
def test_types_that_are_learned_in_parts_are_those_of_the_whole(column: list[Any], size: int) -> None:
    notes: list[str] = []
    whole = to_columns({"x": column}, notes)["x"]
    rows = [{"x": value} for value in column]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_types, "CHUNK", size)
        types, path = ColumnTypes(["x"]), Path(folder, "rows.parquet")
        list(types.watch(rows))
        found = write_parquet(path, lambda: rows, types)
        assert found == [f"rows.parquet: {note}" for note in notes]
        again = pq.read_table(path)["x"].to_pylist()
        pq.write_table(pa.table({"x": whole}), path)
        assert str(again) == str(pq.read_table(path)["x"].to_pylist())


def test_messages_with_keys_of_several_shapes_stay_messages_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_types, "CHUNK", 1)
    extra: list[dict[str, Any]] = [{}, {"n": 1}, {"n": "one"}, {"tool_calls": [{"f": {}}]}]
    rows = [{"messages": [{"role": "user", "content": "hi", **more}]} for more in extra]
    (note,) = write(tmp_path / "rows.parquet", rows)
    assert "carried as JSON text" in note
    whole = to_columns({"messages": [row["messages"] for row in rows]}, [])["messages"]
    assert pq.read_table(tmp_path / "rows.parquet")["messages"].to_pylist() == whole.to_pylist()


def test_parquet_keeps_types_and_says_what_became_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows: list[dict[str, Any]] = [
        {"uid": "a", "ragged": [[1.0], []], "mixed": 1, "score": math.nan},
        {"uid": "b", "ragged": [], "mixed": "one", "messages": [{"role": "user", "content": "hi"}]},
    ]
    notes = write(path, rows)
    assert notes == ["rows.parquet: column 'mixed' holds int, str: carried as text"]
    again = pq.read_table(path).to_pylist()
    assert [row["ragged"] for row in again] == [[[1.0], []], []]
    assert [row["mixed"] for row in again] == ["1", "one"]
    assert math.isnan(again[0]["score"])
    assert again[1]["messages"] == [{"role": "user", "content": "hi"}]
    write(path, [], columns=["uid", "messages"])
    assert pq.read_table(path).column_names == ["uid", "messages"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "rows",
    [
        [{"uid": str(i), "tags": ["x"] * (i % 3), "meta": {"level": i}} for i in range(10)],
        [{"uid": str(i), **({"late": i} if i > 4 else {})} for i in range(10)],
        [{"uid": str(i), "mixed": i if i < 5 else "five"} for i in range(10)],
        [{"uid": str(i), "mixed": {"a": i} if i < 5 else "five"} for i in range(10)],
        [{"uid": str(i), "score": None if i < 5 else 0.5} for i in range(10)],
        [{"uid": str(i), "meta": {"even": i} if i < 5 else {"odd": i}} for i in range(10)],
        [],
    ],
    ids=["nested", "a late column", "mixed", "objects and texts", "late numbers", "structs of other keys", "none"],
)
def test_rows_that_are_not_held_give_the_same_parquet(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tables = tmp_path / "rows.parquet", []
    for size in (100, 3):
        monkeypatch.setattr(column_types, "CHUNK", size)
        write(path, rows, columns=("uid",))
        tables.append(pq.read_table(path))
    assert tables[0].equals(tables[1])
