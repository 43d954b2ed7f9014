"""Python values of a data set's own columns as Arrow arrays, whatever they are."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rolegraph.errors import DataError
from rolegraph.json_rows import encode

DEEPEST = 32
"""Levels of lists and structs in a column; Arrow itself sends no more than 64 to another process."""


def to_columns(values: Mapping[str, list[Any]], notes: list[str]) -> dict[str, pa.Array]:
    """One array a column; what a column had to become to have one type is written to `notes`."""
    return {name: _array(name, column, notes) for name, column in values.items()}


def given_back_otherwise(values: Mapping[str, list[Any]], columns: Mapping[str, pa.Array]) -> pa.Array | None:
    """[rows] what a row's columns do not give back as it was, as one JSON object; null for a row of which all is.

    Objects of several keys get all of them, numbers among texts become texts, and so on. None: it is so for no row.
    """
    rows: dict[int, dict[str, Any]] = {}
    for name, column in values.items():
        if pa.types.is_string(columns[name].type) and {type(value) for value in column} <= {str, type(None)}:
            continue
        same: Callable[[Any, Any], bool] = operator.eq if _only_texts(columns[name].type) else _same
        for index, (value, again) in enumerate(zip(column, columns[name].to_pylist(), strict=True)):
            if value is not None and not same(value, again):
                rows.setdefault(index, {})[name] = value
    if not rows:
        return None
    count = len(next(iter(values.values())))
    return pa.array([encode(rows[index]).decode() if index in rows else None for index in range(count)], pa.string())


def _only_texts(kind: pa.DataType) -> bool:
    """Whether a type holds nothing that equals something of another type, as 1 equals 1.0 and true."""
    if pa.types.is_struct(kind):
        return all(_only_texts(field.type) for field in kind)
    return pa.types.is_string(kind) or (pa.types.is_list(kind) and _only_texts(kind.value_type))


def _same(value: Any, again: Any) -> bool:
    try:
        return encode({"": value}) == encode({"": again})
    except DataError:  # what has no form in JSON cannot be kept so
        return True


def _array(name: str, values: list[Any], notes: list[str]) -> pa.Array:
    try:
        array = _settled(pa.array(values))
        if holds(array.type):
            return array
    except (pa.ArrowException, TypeError, OverflowError):
        pass
    kinds = {type(value) for value in values if value is not None}
    listed = ", ".join(sorted(kind.__name__ for kind in kinds))
    exact = not any(map(large, values))
    if kinds <= {int, float} and exact:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds <= {bool, int, float, str}:
        notes.append(f"column {name!r} holds {listed}: carried as text")
        return pa.array([as_text(value) for value in values], pa.string())
    if name == "messages":
        return _messages(values, notes)
    notes.append(f"column {name!r} holds values of several shapes ({listed}): carried as JSON text")
    return pa.array([as_json(value) for value in values], pa.string())


def _messages(values: list[Sequence[Mapping[str, Any]] | None], notes: list[str]) -> pa.Array:
    """Chats whose messages have further keys of several shapes, which become JSON text; they stay lists of objects."""
    notes.append("messages have keys whose values are of several shapes: these are carried as JSON text")
    plain = ("role", "content")
    chats = [
        chat and [{key: item if key in plain else as_json(item) for key, item in turn.items()} for turn in chat]
        for chat in values
    ]
    return pa.array(chats)


def large(value: Any) -> bool:
    """Whether this is a whole number that a float does not hold."""
    return isinstance(value, int) and abs(value) > 2**53


def as_json(value: Any) -> str | None:
    """A value as JSON text; null for null."""
    return None if value is None else json.dumps(value, default=str)


def as_text(value: Any) -> str | None:
    """A text, number or truth value as text; null for what is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):  # a text that is missing
        return None
    return value if isinstance(value, str) else json.dumps(value)


def holds(kind: pa.DataType, room: int = DEEPEST) -> bool:
    """Whether a column of this type can be sent and written: not too deep, and no struct without a field."""
    if pa.types.is_struct(kind):
        return room > 0 and kind.num_fields > 0 and all(holds(field.type, room - 1) for field in kind)
    return not pa.types.is_list(kind) or (room > 0 and holds(kind.value_type, room - 1))


def _settled(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One chunk, and a type that a reader can do something with: a column of nulls becomes text."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array
