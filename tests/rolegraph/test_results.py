"""Results are whole, or as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolegraph import results
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


def test_parquet_keeps_types_and_says_what_became_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows: list[dict[str, Any]] = [
        {"uid": "a", "ragged": [[1.0], []], "mixed": 1, "score": math.nan},
        {"uid": "b", "ragged": [], "mixed": "one", "messages": [{"role": "user", "content": "hi"}]},
    ]
    notes = write_parquet(path, rows)
    assert notes == ["rows.parquet: column 'mixed' holds int, str: carried as text"]
    again = pq.read_table(path).to_pylist()
    assert [row["ragged"] for row in again] == [[[1.0], []], []]
    assert [row["mixed"] for row in again] == ["1", "one"]
    assert math.isnan(again[0]["score"])
    assert again[1]["messages"] == [{"role": "user", "content": "hi"}]
    write_parquet(path, [], columns=["uid", "messages"])
    assert pq.read_table(path).column_names == ["uid", "messages"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("rows", "is_streamed"),
    [
        ([{"uid": str(i), "tags": ["x"] * (i % 3), "meta": {"level": i}} for i in range(10)], True),
        ([{"uid": str(i), **({"late": i} if i > 4 else {})} for i in range(10)], True),
        ([{"uid": str(i), "mixed": i if i < 5 else "five"} for i in range(10)], False),
        ([{"uid": str(i), "meta": {"even": i} if i < 5 else {"odd": i}} for i in range(10)], True),
        ([], False),
    ],
    ids=["nested", "a late column", "mixed", "structs of other keys", "none"],
)
def test_rows_that_are_not_held_give_the_same_parquet(
    rows: list[dict[str, Any]], is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PARQUET_ROWS", 3)
    whole, streamed = tmp_path / "whole.parquet", tmp_path / "streamed.parquet"
    results.write_parquet(whole, rows, columns=("uid",))
    held: list[int] = []
    write = results.write_parquet
    monkeypatch.setattr(results, "write_parquet", lambda *args, **more: (held.append(1), write(*args, **more))[1])
    results.stream_parquet(streamed, lambda: iter(rows), columns=("uid",))
    assert pq.read_table(streamed).equals(pq.read_table(whole))
    assert bool(held) != is_streamed
