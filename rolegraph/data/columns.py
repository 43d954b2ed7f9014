"""Python values of a data set's own columns as Arrow arrays, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa


def to_columns(values: Mapping[str, list[Any]], notes: list[str]) -> dict[str, pa.Array]:
    """One array a column; what a column had to become to have one type is written to `notes`."""
    return {name: _array(name, column, notes) for name, column in values.items()}


def _array(name: str, values: list[Any], notes: list[str]) -> pa.Array:
    try:
        return _settled(pa.array(values))
    except (pa.ArrowException, TypeError, OverflowError):
        pass
    kinds = {type(value) for value in values if value is not None}
    listed = ", ".join(sorted(kind.__name__ for kind in kinds))
    exact = not any(isinstance(value, int) and abs(value) > 2**53 for value in values)
    if kinds <= {int, float} and exact:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds <= {bool, int, float, str}:
        notes.append(f"column {name!r} holds {listed}: carried as text")
        return pa.array(
            [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values], pa.string()
        )
    notes.append(f"column {name!r} holds values of several shapes ({listed}): carried as JSON text")
    return pa.array([None if value is None else json.dumps(value, default=str) for value in values], pa.string())


def _settled(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One chunk, and a type that a reader can do something with: a column of nulls becomes text."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array
