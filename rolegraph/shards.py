"""Where heavy rows lie in the object store, and how an actor puts the rows it was sent together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rolegraph.errors import BatchError

if TYPE_CHECKING:
    from ray import ObjectRef


class Shard(NamedTuple):
    """One heavy table in the object store: the object is the table, or a tuple that holds it as item `item`."""

    ref: ObjectRef[Any]
    item: int = 0


@dataclass(frozen=True, eq=False)
class Place:
    """Where the rows of some heavy columns lie; columns that travelled together share one place."""

    shards: tuple[Shard, ...]
    shard: np.ndarray[Any, Any]
    """[rows] int32, index into `shards`."""
    row: np.ndarray[Any, Any]
    """[rows] int32, row in that shard."""

    def take(self, indices: np.ndarray[Any, Any]) -> Place:
        """The rows at `indices`, without shards that are no longer needed."""
        used, shard = np.unique(self.shard[indices], return_inverse=True)
        return Place(tuple(self.shards[i] for i in used), shard.astype(np.int32), self.row[indices])

    @staticmethod
    def concat(places: Sequence[Place]) -> Place:
        """The rows of all places, one after another."""
        shards: dict[Shard, int] = {}
        numbers = []
        for place in places:
            renumber = np.array([shards.setdefault(s, len(shards)) for s in place.shards], np.int32)
            numbers.append(renumber[place.shard] if len(place.shard) else place.shard)
        return Place(tuple(shards), np.concatenate(numbers), np.concatenate([place.row for place in places]))


@dataclass(frozen=True)
class LightPart:
    """What the driver gets of a batch whose heavy columns are a second value: see `Batch.to_parts`."""

    table: pa.Table
    heavy: pa.Schema
    rows: int


@dataclass(frozen=True)
class Column:
    """A heavy column that is elsewhere: its type, its place, and its name there where that is another one."""

    type: pa.DataType
    place: Place = field(repr=False)
    stored: str | None = None

    def renamed(self, name: str, names: Mapping[str, str]) -> Column:
        """This column, called `name` so far, under its new name."""
        there = self.stored or name
        return replace(self, stored=None if names.get(name, name) == there else there)


def concat_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Rows of tables with the same columns, in any column order; null columns take the type of the others."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise BatchError(f"cannot concatenate columns of different types: {error}") from error


def concat_away(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    joined: dict[tuple[int, ...], Place] = {}
    result = {}
    for name, column in parts[0].items():
        places = [part[name].place for part in parts]
        key = tuple(id(place) for place in places)
        if key not in joined:
            joined[key] = Place.concat(places)
        if odd := {part[name].stored for part in parts} - {column.stored}:
            raise BatchError(f"cannot concatenate {name!r}: it is stored as {odd.pop()!r} in one of the batches")
        result[name] = Column(column.type, joined[key], column.stored)
    return result


class Refs:
    """The distinct objects that one call's arguments need, in the order in which they are sent."""

    def __init__(self) -> None:
        self.refs: list[ObjectRef[Any]] = []
        self._position: dict[ObjectRef[Any], int] = {}

    def add(self, ref: ObjectRef[Any]) -> int:
        """Position of `ref` among the objects sent."""
        if ref not in self._position:
            self._position[ref] = len(self.refs)
            self.refs.append(ref)
        return self._position[ref]


@dataclass(frozen=True)
class Crate:
    """The rows of some heavy columns, with positions among the call's objects instead of references."""

    schema: pa.Schema
    stored: tuple[str, ...]
    """Names of the columns in the shards."""
    shards: tuple[tuple[int, int], ...]
    """(position among the objects, item of that object) of each shard."""
    shard: np.ndarray[Any, Any]
    row: np.ndarray[Any, Any]

    def gather(self, objects: Sequence[Any]) -> pa.Table:
        """The rows, from the objects that arrived; zero-copy when they are one run of one shard."""
        names = list(self.schema.names)
        tables = [_item(objects[at], item).select(self.stored).rename_columns(names) for at, item in self.shards]
        if not len(self.row):
            return self.schema.empty_table()
        breaks = np.flatnonzero(np.diff(self.shard) != 0) + 1
        if len(breaks) < 4 * len(tables):
            bounds = [0, *breaks.tolist(), len(self.row)]
            runs = [_rows(tables[self.shard[a]], self.row[a:b]) for a, b in pairwise(bounds)]
            return runs[0] if len(runs) == 1 else concat_tables(runs)
        # Scattered rows: each shard is read once, then the rows are put in order.
        order = np.argsort(self.shard, kind="stable")
        counts = np.bincount(self.shard, minlength=len(tables))
        parts = np.split(self.row[order], np.cumsum(counts)[:-1])
        together = concat_tables([_rows(t, rows) for t, rows in zip(tables, parts, strict=True) if len(rows)])
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return together.take(pa.array(back))


@dataclass(frozen=True)
class Parcel:
    """A batch on its way to an actor: its columns that are here, and crates of those that are elsewhere."""

    here: pa.Table
    crates: tuple[Crate, ...]
    streamed: Mapping[str, Column]
    """Columns that stay references on arrival; those inside an argument are not fetched by Ray."""

    def unpack(self, objects: Sequence[Any]) -> pa.Table:
        """All columns but the streamed ones as one table, perhaps in several chunks."""
        table = self.here
        columns = {name: table.column(name) for name in table.column_names}
        for crate in self.crates:
            gathered = crate.gather(objects)
            columns.update({name: gathered.column(name) for name in gathered.column_names})
        return pa.table(columns)


def pack(here: pa.Table, away: Mapping[str, Column], refs: Refs, streamed: frozenset[str] = frozenset()) -> Parcel:
    """A batch's columns as a parcel; the objects it needs are added to `refs`, but not those of `streamed` columns."""
    later = {name: column for name, column in away.items() if name in streamed}
    fields: dict[int, list[tuple[str, pa.DataType]]] = {}
    stored: dict[int, list[str]] = {}
    places: dict[int, Place] = {}
    for name, column in away.items():
        if name in later:
            continue
        fields.setdefault(id(column.place), []).append((name, column.type))
        stored.setdefault(id(column.place), []).append(column.stored or name)
        places[id(column.place)] = column.place
    crates = []
    for key, place in places.items():
        shards = tuple((refs.add(shard.ref), shard.item) for shard in place.shards)
        crates.append(Crate(pa.schema(fields[key]), tuple(stored[key]), shards, place.shard, place.row))
    return Parcel(here, tuple(crates), later)


def _item(value: Any, index: int) -> pa.Table:
    return value[index] if isinstance(value, tuple) else value


def _rows(table: pa.Table, rows: np.ndarray[Any, Any]) -> pa.Table:
    """Rows of one table: a slice where they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1 and np.all(np.diff(rows) == 1):
        return table.slice(int(rows[0]), len(rows))
    return table.take(pa.array(rows))
