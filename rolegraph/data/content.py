"""A hash of what a table says, whatever its buffers look like."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from hashlib import _Hash


def content_hash(table: pa.Table) -> str:
    """Of all columns with their names and types, in the order of the rows; the columns' own order does not matter."""
    found = hashlib.sha256(f"{len(table)}\n".encode())
    for name in sorted(table.column_names):
        column = table[name]
        found.update(json.dumps([name, str(column.type)]).encode())
        for start in range(0, len(table), _ROWS):
            _add(found, pa.concat_arrays(column.slice(start, _ROWS).chunks))
    return found.hexdigest()


_ROWS = 1 << 14
"""At a time, so that a large table is not there twice."""


def _add(found: _Hash, values: Any) -> None:
    """One array: which values are null, how long each is, and then the values themselves."""
    kind = values.type
    found.update(np.packbits(_numpy(values.is_valid())).tobytes())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        found.update(_numpy(pc.list_value_length(values).fill_null(0)).astype("<i8").tobytes())
        _add(found, values.flatten())
    elif pa.types.is_struct(kind):
        for field, inner in zip(kind, values.flatten(), strict=True):
            found.update(field.name.encode())
            _add(found, inner)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        found.update(_numpy(pc.binary_length(values).fill_null(0)).astype("<i8").tobytes())
        whole = values.drop_null().cast(pa.large_binary())
        found.update(b"".join(whole.to_pylist()))
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        kept = _numpy(values.drop_null())
        found.update(kept.astype(kept.dtype.newbyteorder("<")).tobytes())
    else:
        found.update(repr(values.to_pylist()).encode())


def _numpy(values: Any) -> np.ndarray[Any, np.dtype[Any]]:
    return np.asarray(values.to_numpy(zero_copy_only=False))
