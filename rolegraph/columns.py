"""Arrow columns as batches use them: what is light, how Python values become arrays, how slices become compact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolegraph.errors import BatchError

LIGHT_STRINGS = frozenset({"uid", "finish_reason", "teacher_key"})
"""The only strings the driver holds; every other string may be as long as a document."""

_INT_LIST, _FLOAT_LIST, _MASK_LIST = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.uint8())
KNOWN_TYPES: dict[str, pa.DataType] = {
    "uid": pa.string(),
    "finish_reason": pa.string(),
    **dict.fromkeys(("prompt_ids", "response_ids", "teacher_prompt_ids"), _INT_LIST),
    **dict.fromkeys(("rollout_logprobs", "logprobs", "ref_logprobs", "entropy", "teacher_token_logprobs"), _FLOAT_LIST),
    "response_mask": _MASK_LIST,
    **dict.fromkeys(("repeat", "step", "group", "prompt_length", "response_length", "length"), pa.int32()),
    "reward_faults": pa.int32(),
    **dict.fromkeys(("weight_version", "weight_version_last"), pa.int64()),
    **dict.fromkeys(("reward", "advantage", "prm_score"), pa.float64()),
    **dict.fromkeys(("response_text", "reward_reasons", "prm_fault", "sample_fault"), pa.string()),
    "repeats": _INT_LIST,
    "step_scores": pa.list_(pa.float64()),
    "step_ends": _INT_LIST,
}
"""Types that plain Python values of these columns become; arrays keep the type they come with."""

_PER_TOKEN = frozenset(
    (
        *("response_mask", "rollout_logprobs", "logprobs", "ref_logprobs", "entropy"),
        *("teacher_ids", "teacher_logprobs", "teacher_token_logprobs", "teacher_hidden"),
    )
)
STREAMED = frozenset({"teacher_hidden"})
"""Columns too large to arrive with a call: an actor gets references to them, and reads rows as it needs them."""


def is_per_token(name: str) -> bool:
    """Whether the column has one entry a response token."""
    return name in _PER_TOKEN


def is_light(name: str, kind: pa.DataType) -> bool:
    """Whether the driver may hold the column: fixed-width numbers, booleans, and `LIGHT_STRINGS`."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return True
    return name in LIGHT_STRINGS


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, flat: row i is `values[offsets[i]:offsets[i + 1]]`.

    values: [items] or, for columns of K entries a token, [items, K]. offsets: [rows + 1], starting at 0; the same
    numbers as the `cu_seqlens` of padding-free attention.
    """

    values: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """[rows] items of each row."""
        return np.diff(self.offsets)


def to_array(name: str, values: Any) -> pa.Array:
    """One contiguous array of a column's values: Arrow data, numpy, `Ragged`, or a Python list."""
    kind = KNOWN_TYPES.get(name) or (pa.float64() if name.startswith("rewards/") else None)
    if isinstance(values, Ragged):
        return _from_flat(values.values, values.offsets)
    if isinstance(values, pa.ChunkedArray):
        return tidy(name, values)
    if isinstance(values, pa.Array):
        return tidy(name, pa.chunked_array([values]))
    if isinstance(values, np.ndarray):
        if values.ndim == 1:
            return tidy(name, pa.chunked_array([pa.array(values)]))
        values = list(values)
    if isinstance(values, Sequence) and len(values) and all(isinstance(v, np.ndarray) and v.ndim for v in values):
        offsets = np.zeros(len(values) + 1, np.int32)
        np.cumsum([len(v) for v in values], out=offsets[1:])
        return tidy(name, pa.chunked_array([_from_flat(np.concatenate(list(values)), offsets)]))
    try:
        array = pa.array(values, type=None if kind == _MASK_LIST else kind)
        return tidy(name, pa.chunked_array([array if kind is None else array.cast(kind)]))
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise BatchError(f"column {name!r} cannot be made from these values: {error}") from error


def tidy(name: str, column: pa.ChunkedArray) -> pa.Array:
    """One chunk, without dictionary encoding; masks as uint8, for Arrow's bit-packed booleans are not zero-copy."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type) and (name in KNOWN_TYPES or name.startswith("rewards/")):
        column = column.cast(KNOWN_TYPES.get(name, pa.float64()))
    if is_list(column.type) and pa.types.is_boolean(column.type.value_type):
        column = column.cast(_MASK_LIST)
    return one_chunk(column)


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array, copied only when it has several chunks."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    return pa.concat_arrays(column.chunks)


def compact(array: pa.Array) -> pa.Array:
    """The same values over buffers that hold nothing else, so that a pickle of it carries only these rows.

    Copies no values where the layout allows (numbers and lists of them without nulls).
    """
    if array.get_total_buffer_size() <= array.nbytes + 128:
        return array
    if array.null_count == 0:
        if is_list(array.type) and len(array):
            offsets = array.offsets.to_numpy()
            child = compact(array.values.slice(offsets[0], offsets[-1] - offsets[0]))
            buffer = pa.py_buffer(np.ascontiguousarray(offsets - offsets[0]))
            return pa.Array.from_buffers(array.type, len(array), [None, buffer], children=[child])
        if pa.types.is_fixed_size_list(array.type):
            return pa.FixedSizeListArray.from_arrays(compact(array.flatten()), type=array.type)
        if pa.types.is_primitive(array.type) and not pa.types.is_boolean(array.type):
            width = array.type.bit_width // 8
            data = array.buffers()[1].slice(array.offset * width, len(array) * width)
            return pa.Array.from_buffers(array.type, len(array), [None, data])
    return pc.take(array, pa.array(np.arange(len(array))))


def compact_table(table: pa.Table) -> pa.Table:
    """Every column compact and in one chunk."""
    return pa.Table.from_arrays([compact(one_chunk(column)) for column in table.columns], schema=table.schema)


def to_ragged(name: str, array: pa.Array) -> Ragged:
    """A list column as flat values and offsets, zero-copy; a null row is an empty one."""
    if not is_list(array.type):
        raise BatchError(f"column {name!r} is {array.type}, not a list column")
    if array.null_count:
        array = pc.fill_null(array, pa.scalar([], array.type))
    offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    width = None
    if pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
        values = values.flatten()
    if values.null_count:
        raise BatchError(f"column {name!r} has {values.null_count} null entries inside its rows")
    try:
        flat = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
    except pa.ArrowInvalid as error:
        raise BatchError(f"column {name!r} is a list of {values.type}, not of numbers") from error
    flat = flat if width is None else flat.reshape(-1, width)
    return Ragged(flat, offsets - offsets[0] if offsets[0] else offsets)


def fixed_size_rows(values: np.ndarray[Any, Any]) -> pa.FixedSizeListArray:
    """[rows, width] as a column of one vector a row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])


def from_fixed_size_rows(array: pa.FixedSizeListArray) -> np.ndarray[Any, Any]:
    """[rows, width] of such a column, zero-copy."""
    return np.asarray(array.flatten().to_numpy(zero_copy_only=True).reshape(len(array), array.type.list_size))


def list_lengths(array: pa.Array) -> np.ndarray[Any, Any]:
    """[rows] lengths of a list column's rows; -1 where the row is null."""
    return np.asarray(pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False))


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists of any length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _from_flat(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> pa.Array:
    """A list array over flat values [items] or [items, K], without copying them."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    kind = pa.LargeListArray if offsets.dtype == np.int64 and len(values) > np.iinfo(np.int32).max else pa.ListArray
    return kind.from_arrays(pa.array(offsets.astype(np.int32 if kind is pa.ListArray else np.int64, copy=False)), flat)
