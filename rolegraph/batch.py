"""`Batch`: an immutable table of named columns, the same type inside an actor and on the driver.

Inside an actor all columns are here. On the driver the light ones are (ids, lengths, rewards, versions); the heavy
ones stay in the object store and the batch knows in which shard and row each of its rows lies, so that selecting,
repeating, joining and splitting moves none of them. Hidden states are too large even for an actor to hold all at once:
a column of that kind (`columns.STREAMED`) stays in the object store there too, and `fetch_sync` reads some rows of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolegraph.columns import (
    Ragged,
    compact_table,
    is_light,
    is_list,
    is_per_token,
    list_lengths,
    one_chunk,
    tidy,
    to_array,
    to_ragged,
)
from rolegraph.errors import AlignmentError, BatchError
from rolegraph.shards import Column, LightPart, Parcel, Place, Refs, Shard, concat_away, concat_tables, pack

if TYPE_CHECKING:
    from ray import ObjectRef

Indices = Sequence[int] | np.ndarray[Any, Any]

_bytes_held = 0


def bytes_held() -> int:
    """Bytes of heavy columns this process ever fetched from the object store; on the driver it should stay 0."""
    return _bytes_held


class Batch:
    """An immutable table of named columns; see the module's docstring.

    >>> batch = Batch.from_columns({"uid": ["a", "b"], "prompt_ids": [[1, 2], [3]]})
    >>> batch.repeat(2).lists("prompt_ids")[1].tolist()
    [1, 2]
    """

    __slots__ = ("_away", "_here")

    def __init__(self, here: pa.Table, away: Mapping[str, Column] | None = None) -> None:
        """Columns that are here and columns that are in the object store; prefer `from_columns`."""
        self._here = here
        self._away: dict[str, Column] = dict(away or {})

    # Making one

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Batch:
        """A local batch of arrays, numpy arrays, lists or `Ragged`s, all with the same number of rows."""
        arrays = {name: to_array(name, values) for name, values in columns.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"columns differ in their number of rows: {sizes}")
        return cls(pa.table(arrays))

    @classmethod
    def from_table(cls, table: pa.Table) -> Batch:
        """A local batch of an Arrow table's columns."""
        return cls(pa.table({name: tidy(name, table.column(name)) for name in table.column_names}))

    def to_parts(self) -> tuple[LightPart, pa.Table]:
        """A local batch as what the driver may hold and what stays in the object store, both compact.

        A Ray task or actor returns them as two values (`num_returns=2`); `from_parts` joins the first with a reference
        to the second. Returned objects outlive the actor that made them.
        """
        table = self.table
        light = [f.name for f in table.schema if is_light(f.name, f.type)]
        heavy = table.drop_columns(light) if light else table
        part = LightPart(compact_table(table.select(light)), heavy.schema, table.num_rows)
        return part, compact_table(heavy)

    @classmethod
    def from_parts(cls, light: LightPart, heavy: ObjectRef[Any], index: int = 0) -> Batch:
        """A driver's batch of one shard: the light part and a reference to the heavy one (item `index` of a tuple)."""
        rows = np.arange(light.rows, dtype=np.int32)
        place = Place((Shard(heavy, index),), np.zeros(light.rows, np.int32), rows)
        return cls(light.table, {f.name: Column(f.type, place) for f in light.heavy})

    def parted(self) -> tuple[Batch, Mapping[str, Column]]:
        """The columns that are here as a batch, and those that are in the object store."""
        return Batch(self._here), self._away

    def with_away(self, columns: Mapping[str, Column]) -> Batch:
        """The same rows with further columns that are in the object store."""
        return Batch(self._here, {**self._away, **columns}) if columns else self

    def share(self) -> Batch:
        """Put the heavy columns that are here into the object store, so that calls send references to them."""
        import ray

        local = Batch(self._here)
        light, heavy = local.to_parts()
        if not heavy.num_columns:
            return self
        shared = Batch.from_parts(light, ray.put(heavy))
        return Batch(shared._here, {**shared._away, **self._away})

    # Reading one

    def __len__(self) -> int:
        if self._away and not self._here.num_columns:
            return len(next(iter(self._away.values())).place.row)
        return int(self._here.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self._away or name in self._here.column_names

    def __repr__(self) -> str:
        away = f", in the object store: {', '.join(self._away)}" if self._away else ""
        return f"Batch({len(self)} rows: {', '.join(self._here.column_names)}{away})"

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, here and in the object store."""
        return [*self._here.column_names, *self._away]

    @property
    def is_local(self) -> bool:
        """Whether every column is here."""
        return not self._away

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns that are here."""
        return self._here.schema

    @property
    def nbytes(self) -> int:
        """Bytes of the columns that are here."""
        return int(self._here.nbytes)

    @property
    def table(self) -> pa.Table:
        """The columns as an Arrow table, each in one chunk; local batches only."""
        if self._away:
            raise BatchError(self._elsewhere(*self._away))
        return self._joined()

    def __getitem__(self, name: str) -> pa.Array:
        """One column as an Arrow array."""
        if name in self._away:
            raise BatchError(self._elsewhere(name))
        if name not in self._here.column_names:
            raise BatchError(f"no column {name!r}; there are: {', '.join(self.column_names)}")
        return self._joined().column(name).chunk(0)

    def numpy(self, name: str) -> np.ndarray[Any, Any]:
        """[rows] a number column as numpy, zero-copy where it has no nulls; nulls are NaN."""
        array = self[name]
        if array.null_count:
            array = pc.fill_null(array.cast(array.type if pa.types.is_floating(array.type) else pa.float64()), np.nan)
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def ragged(self, name: str) -> Ragged:
        """A list column as flat values and offsets, zero-copy."""
        return to_ragged(name, self[name])

    def lists(self, name: str) -> list[np.ndarray[Any, Any]]:
        """A list column as one numpy view a row."""
        ragged = self.ragged(name)
        return np.split(ragged.values, ragged.offsets[1:-1]) if len(self) else []

    def write_parquet(self, path: str | Path) -> None:
        """Write a local batch as a Parquet file."""
        import pyarrow.parquet as pq

        pq.write_table(self.table, path)

    # Choosing rows and columns

    def take(self, indices: Indices) -> Batch:
        """The rows at `indices`, in that order; repeats allowed."""
        where = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(where) and (where.min() < 0 or where.max() >= len(self)):
            raise BatchError(f"row {int(where.min() if where.min() < 0 else where.max())} of {len(self)} rows")
        if len(where) and where[-1] - where[0] == len(where) - 1 and np.all(np.diff(where) == 1):
            here = self._here.slice(int(where[0]), len(where))
        else:
            here = Batch.from_table(self._here.take(pa.array(where)))._here if self._here.num_columns else self._here
        return Batch(here, self._move(lambda place: place.take(where)))

    def slice(self, start: int, stop: int | None = None) -> Batch:
        """Rows start..stop, as Python slices count them."""
        return self.take(np.arange(len(self))[start:stop])

    def filter(self, mask: Any) -> Batch:
        """The rows where `mask` [rows] is true."""
        chosen = np.asarray(mask, dtype=bool)
        if chosen.shape != (len(self),):
            raise BatchError(f"a mask of shape {chosen.shape} for {len(self)} rows")
        return self.take(np.flatnonzero(chosen))

    def repeat(self, times: int) -> Batch:
        """Every row `times` times, its copies beside each other."""
        return self.take(np.repeat(np.arange(len(self)), times))

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        wanted = list(names)
        if missing := [name for name in wanted if name not in self]:
            raise BatchError(f"no column {missing[0]!r}; there are: {', '.join(self.column_names)}")
        here = self._here.select([name for name in wanted if name not in self._away])
        return Batch(here, {name: self._away[name] for name in wanted if name in self._away})

    def drop(self, names: Iterable[str]) -> Batch:
        """All columns but these; names that are not there are passed over."""
        gone = set(names)
        return self.select([name for name in self.column_names if name not in gone])

    def rename(self, names: Mapping[str, str]) -> Batch:
        """The same columns under new names, old name to new; no heavy column moves."""
        if taken := [new for old, new in names.items() if new != old and new in self and new not in names]:
            raise BatchError(f"cannot rename a column to {taken[0]!r}: there is one of that name")
        here = self._here.rename_columns([names.get(name, name) for name in self._here.column_names])
        return Batch(here, {names.get(name, name): c.renamed(name, names) for name, c in self._away.items()})

    # Joining

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """Add columns, or replace those of the same name."""
        return self.drop(columns).merge(Batch.from_columns(columns)) if columns else self

    def merge(self, other: Batch) -> Batch:
        """The columns of another batch of the same rows beside these."""
        if len(other) != len(self) and self.column_names and other.column_names:
            raise BatchError(f"cannot merge {len(other)} rows beside {len(self)}")
        here = self._here
        for name in other._here.column_names:
            if name not in self:
                here = here.append_column(other._here.schema.field(name), other._here.column(name))
            elif name in self._away or not here.column(name).equals(other._here.column(name)):
                raise BatchError(f"column {name!r} differs in the two batches to merge; drop it from one of them")
        if both := [name for name in other._away if name in self]:
            raise BatchError(f"column {both[0]!r} is in both batches to merge; drop it from one of them")
        return Batch(here, {**self._away, **other._away})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of all batches, one after another; they must have the same columns."""
        full = [batch for batch in batches if len(batch)] or list(batches[:1])
        if len(full) <= 1:
            return full[0] if full else Batch.from_columns({})
        first = full[0]
        for batch in full[1:]:
            if odd := set(batch.column_names) ^ set(first.column_names):
                raise BatchError(f"cannot concatenate: some batches lack the columns {', '.join(sorted(odd))}")
            if odd := set(batch._away) ^ set(first._away):
                raise BatchError(
                    f"cannot concatenate {sorted(odd)}: here in one batch, in the object store in another;"
                    " call share() on the former"
                )
        return Batch(concat_tables([batch._here for batch in full]), concat_away([batch._away for batch in full]))

    # The object store

    async def fetch(self, columns: Iterable[str] | None = None) -> Batch:
        """A local batch with all columns, or with these."""
        wanted = self if columns is None else self.select(columns)
        refs = Refs()
        parcel = wanted.pack_into(refs)
        return Batch(parcel.unpack(_count(await asyncio.gather(*refs.refs))))

    def fetch_sync(self, columns: Iterable[str] | None = None) -> Batch:
        """`fetch` for programs without an event loop."""
        wanted = self if columns is None else self.select(columns)
        if wanted.is_local:
            return wanted
        import ray

        refs = Refs()
        parcel = wanted.pack_into(refs)
        return Batch(parcel.unpack(_count(ray.get(refs.refs))))

    def check_alignment(self) -> None:
        """Every per-token column that is here has one entry a response token; a null row has none.

        Raises AlignmentError naming the first row's uid that breaks it.
        """
        if "response_ids" not in self:
            return
        expected = list_lengths(self["response_ids"])
        for name in filter(is_per_token, self._here.column_names):
            if not is_list(self._here.schema.field(name).type):
                continue
            lengths = list_lengths(self[name])
            wrong = np.flatnonzero(np.maximum(lengths, 0) != np.maximum(expected, 0))
            if len(wrong):
                i = int(wrong[0])
                uid = self["uid"][i].as_py() if "uid" in self else i
                entries, tokens = max(lengths[i], 0), max(expected[i], 0)
                raise AlignmentError(
                    f"row {uid}: column {name} has {entries} entries for {tokens} response tokens"
                    + (f" ({len(wrong)} such rows)" if len(wrong) > 1 else "")
                    + "; a per-token column has one entry a response token"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrow pickles the whole buffer behind a slice.
        return (Batch, (compact_table(self._here), self._away))

    def pack_into(self, refs: Refs, streamed: frozenset[str] = frozenset()) -> Parcel:
        """This batch as it is sent; the objects it needs are added to `refs`, those of `streamed` columns aside."""
        return pack(compact_table(self._here), self._away, refs, streamed)

    @classmethod
    def unpacked(cls, parcel: Parcel, objects: Sequence[Any]) -> Batch:
        """A parcel that arrived with the objects it needs; its streamed columns are still in the object store."""
        return cls(parcel.unpack(objects), parcel.streamed)

    def _joined(self) -> pa.Table:
        """The columns that are here with one chunk each: joined when first read, for many batches only pass through."""
        if any(column.num_chunks != 1 for column in self._here.columns):
            self._here = pa.table({name: one_chunk(self._here.column(name)) for name in self._here.column_names})
        return self._here

    def _move(self, move: Callable[[Place], Place]) -> dict[str, Column]:
        """The columns elsewhere with `move` applied once to each place."""
        moved: dict[int, Place] = {}
        for column in self._away.values():
            if id(column.place) not in moved:
                moved[id(column.place)] = move(column.place)
        return {name: replace(column, place=moved[id(column.place)]) for name, column in self._away.items()}

    def _elsewhere(self, *names: str) -> str:
        listed = ", ".join(repr(name) for name in names)
        return f"column {listed} is in the object store; `await batch.fetch([{listed}])` gives a local batch"


def _count(values: list[Any]) -> list[Any]:
    """Add fetched tables to `bytes_held`."""
    global _bytes_held
    for value in values:
        _bytes_held += sum(table.nbytes for table in (value if isinstance(value, tuple) else (value,)))
    return values
