"""Rows as lines of JSON: exactly, for files that a run reads again, and plainly, for other programs.

Exactly: values that JSON has no form for are written as an object with one key, and come back as they were:
`{"$float": "nan"}` (also "inf" and "-inf"), `{"$bytes": BASE64}`, `{"$datetime": ISO}`, `{"$date": ISO}`,
`{"$time": ISO}`, `{"$duration": [DAYS, SECONDS, MICROSECONDS]}` and `{"$decimal": TEXT}`; an object that has such a key
of its own is `{"$object": OBJECT}`. Tuples come back as lists, arrays of numpy too, and time zones as their offset.
"""

from __future__ import annotations

import base64
import datetime as dt
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from rolegraph.errors import DataError

Row = dict[str, Any]

EXACT = "exact_columns"
"""A column with what the row's other columns do not give back as the data set had it, as `encode` writes it."""


def encode(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON, without its end. Raises DataError that names the column of what has no form."""
    try:
        # Most rows need no more than this; it refuses what is no JSON.
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        if '"$' not in text:
            return text.encode()
    except (TypeError, ValueError, RecursionError):
        pass
    parts = []
    for name, value in row.items():
        try:
            json_value = json.dumps(_tagged(value), ensure_ascii=False, allow_nan=False)
            parts.append(f"{json.dumps(name, ensure_ascii=False)}: {json_value}".encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"column {name!r} of uid {row.get('uid')!r} cannot be written as JSON: {error}") from error
    return b"{" + b", ".join(parts) + b"}"


def decode(line: bytes) -> Row:
    """The row of a line that `encode` wrote. Raises ValueError where it is none."""
    try:
        row = json.loads(line.decode())
        if isinstance(row, dict):
            return {name: _untagged(value) for name, value in row.items()} if b'{"$' in line else row
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    raise ValueError(f"not a JSON object but a {type(row).__name__}")


_TO_TEXT: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (bytes, "$bytes", lambda value: base64.b64encode(value).decode()),
    (dt.datetime, "$datetime", lambda value: value.isoformat()),  # before date, which it is too
    (dt.date, "$date", dt.date.isoformat),
    (dt.time, "$time", dt.time.isoformat),
    (dt.timedelta, "$duration", lambda value: _duration(value)),
    (Decimal, "$decimal", str),
)
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$datetime": lambda text: _datetime(text),
    "$date": dt.date.fromisoformat,
    "$time": dt.time.fromisoformat,
    "$duration": lambda value: dt.timedelta(*value),
    "$decimal": Decimal,
}


def _tagged(value: Any) -> Any:
    """The value with a tag on what JSON has no form for."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        inner = {_name(key): _tagged(item) for key, item in value.items()}
        return {"$object": inner} if any(key.startswith("$") for key in inner) else inner
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    for kind, tag, write in _TO_TEXT:
        if isinstance(value, kind):
            return {tag: write(value)}
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return _tagged(value.tolist())
    raise TypeError(f"a {type(value).__name__} has no form there")


def _duration(value: dt.timedelta) -> list[int]:
    if getattr(value, "nanoseconds", 0):  # of pandas, as Arrow gives durations of that unit
        raise TypeError("a duration with nanoseconds has no form there")
    return [value.days, value.seconds, value.microseconds]


def _datetime(text: str) -> dt.datetime:
    """Nanoseconds, which Python's own type lacks, come back in that of pandas, as Arrow gives them."""
    if not re.search(r"\.\d{7}", text):
        return dt.datetime.fromisoformat(text)
    found: dt.datetime = importlib.import_module("pandas").Timestamp(text)
    return found


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is no text")
    return key


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "$object":
            return {key: _untagged(item) for key, item in inner.items()}
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](inner)
    return {key: _untagged(item) for key, item in value.items()}


def encode_plain(row: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """A row as a line of JSON for other programs, and the columns that lost a value.

    Bytes are base64, times ISO 8601, durations seconds and decimals text. JSON has no NaN and no infinity: they become
    null, which is what is lost. Raises DataError that names the uid where there is no form.
    """
    plain: Row = {}
    lost = []
    for name, value in row.items():
        found = [0]
        plain[name] = _plain(value, found)
        lost += [name] if found[0] else []
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode(), lost
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the row of uid {row.get('uid')!r} cannot be written as JSON: {error}") from error


def _plain(value: Any, lost: list[int]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost[0] += 1
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item, lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, lost) for item in value]
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    for kind, _, write in _TO_TEXT:
        if isinstance(value, kind):
            return write(value)
    return _plain(value.tolist(), lost) if hasattr(value, "tolist") else value
