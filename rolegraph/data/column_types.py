"""The types of columns whose rows pass by a few at a time, as `columns.to_columns` gives them to all rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import pyarrow as pa

from rolegraph.data.columns import as_json, as_text, holds, large

CHUNK = 1024
"""Rows that are held together."""
Rows = Sequence[Mapping[str, Any]]


@dataclass
class _Column:
    """What is known of a column."""

    common: pa.DataType | None = field(default_factory=pa.null)
    """Null: its values have no type in common."""
    kinds: set[type] = field(default_factory=set)
    has_large: bool = False
    """Whether a whole number is too large for a float."""
    keys: dict[str, None] = field(default_factory=dict)
    """Of messages."""

    def add(self, values: list[Any], is_chat: bool) -> None:
        self.kinds |= {type(value) for value in values if value is not None}
        self.has_large = self.has_large or any(map(large, values))
        if is_chat:
            self.keys |= {key: None for chat in values if isinstance(chat, list) for turn in chat for key in turn}
        if self.common is not None:
            try:
                self.common = merged(self.common, pa.array(values).type)
            except (pa.ArrowException, TypeError, OverflowError):
                self.common = None

    def carried(self, name: str) -> Literal["native", "float", "text", "messages", "json"]:
        """In which form its values are carried; the rules of `to_columns`."""
        if self.common is not None and holds(self.common):
            return "native"
        if self.kinds <= {int, float} and not self.has_large:
            return "float"
        if self.kinds <= {bool, int, float, str}:
            return "text"
        return "messages" if name == "messages" else "json"


class MisfitError(Exception):
    """A column has another type than was thought: what was written of it has to be written again."""


class ColumnTypes:
    """Learns the types of columns, and then makes them.

    Args:
        columns: names of columns that are there even without rows.
    """

    def __init__(self, columns: Iterable[str] = ()) -> None:
        self._columns = {name: _Column() for name in columns}

    def watch(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The rows as they come, learned from a chunk at a time."""
        for chunk in chunks(rows):
            for name in dict.fromkeys(name for row in chunk for name in row):
                column = self._columns.setdefault(name, _Column())
                column.add([row.get(name) for row in chunk], name == "messages")
            yield from chunk

    @property
    def notes(self) -> list[str]:
        """What columns had to become to have one type."""
        found = []
        for name, column in self._columns.items():
            listed = ", ".join(sorted(kind.__name__ for kind in column.kinds))
            text = {
                "text": f"column {name!r} holds {listed}: carried as text",
                "messages": "messages have keys whose values are of several shapes: these are carried as JSON text",
                "json": f"column {name!r} holds values of several shapes ({listed}): carried as JSON text",
            }.get(column.carried(name))
            found += [text] if text else []
        return found

    @property
    def schema(self) -> pa.Schema:
        """Names and types."""
        return pa.schema([(name, self._type(name)) for name in self._columns])

    def _type(self, name: str) -> pa.DataType:
        column = self._columns[name]
        carried = column.carried(name)
        if carried == "native":
            assert column.common is not None
            return pa.string() if pa.types.is_null(column.common) else column.common
        if carried == "messages":
            return pa.list_(pa.struct([(key, pa.string()) for key in column.keys]))
        return pa.float64() if carried == "float" else pa.string()

    def table(self, rows: Rows) -> pa.Table:
        """Some of the rows that were watched, as columns of these types.

        What a column's common type does not take after all (whole numbers that a float cannot hold, far inside) makes
        it text: `schema` is another one then, and MisfitError says so.
        """
        arrays = []
        for name, column in self._columns.items():
            values = [row.get(name) for row in rows]
            try:
                arrays.append(pa.array(_as_carried(values, column.carried(name)), self._type(name)))
            except (pa.ArrowException, TypeError, OverflowError) as error:
                if column.common is None:
                    raise
                column.common = None
                raise MisfitError(f"column {name!r}: {error}") from error
        return pa.table(arrays, schema=self.schema)


def chunks(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The rows, so many at a time."""
    left = iter(rows)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def merged(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type of values of both, as Arrow infers it from all of them together; null where there is none."""
    if one.equals(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        inner = merged(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {each.name: each.type for each in one}
        for each in other:
            found = merged(fields.get(each.name, pa.null()), each.type)
            if found is None:
                return None
            fields[each.name] = found
        return pa.struct(list(fields.items()))
    return None


def _as_carried(values: list[Any], carried: str) -> list[Any]:
    if carried == "float":
        return [None if value is None else float(value) for value in values]
    if carried == "text":
        return [as_text(value) for value in values]
    if carried == "json":
        return [as_json(value) for value in values]
    if carried == "messages":
        plain = ("role", "content")
        return [
            chat and [{key: item if key in plain else as_json(item) for key, item in turn.items()} for turn in chat]
            for chat in values
        ]
    return values
