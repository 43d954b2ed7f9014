"""What travels between driver and actor: arguments with references beside them, results with heavy columns apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.columns import STREAMED
from rolegraph.shards import Column, LightPart, Parcel, Refs

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class Heavy:
    """Stands in a result for a batch: its light part, and which of the result's other tables are its own."""

    light: LightPart
    item: int
    streamed: pa.Schema
    """Columns of the table at `item` among the streamed ones."""
    away: Mapping[str, Column]
    """Columns that the actor had references to itself."""


Tables = tuple[pa.Table, ...]
Payload = tuple[str, tuple[Any, ...], dict[str, Any]]
"""An endpoint's name and its arguments, with parcels for the batches that are elsewhere."""


def encode_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Payload, list[ObjectRef[Any]]]:
    """A call as it is sent, and the objects its parcels need: sent beside it, so that Ray fetches them."""
    if not args and not kwargs:
        return (name, args, kwargs), []
    refs = Refs()

    def swap(value: Any) -> Any:
        return value.pack_into(refs, STREAMED) if isinstance(value, Batch) and not value.is_local else value

    return (name, _map(swap, args), _map(swap, kwargs)), refs.refs


def decode_arguments(payload: Payload, objects: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the role's method takes them, every batch local but for its streamed columns."""

    def swap(value: Any) -> Any:
        return Batch.unpacked(value, objects) if isinstance(value, Parcel) else value

    _, args, kwargs = payload
    return _map(swap, args), _map(swap, kwargs)


def encode_result(result: Any) -> tuple[Any, Tables, Tables]:
    """A result without its heavy columns, those, and the streamed ones (`columns.STREAMED`) apart from them.

    These are an object of their own, for whoever is sent a column gets the whole object that it is in.
    """
    tables: list[pa.Table] = []
    large: list[pa.Table] = []

    def swap(value: Any) -> Any:
        if not isinstance(value, Batch):
            return value
        here, away = value.parted()
        light, heavy = here.to_parts()
        later = heavy.select([name for name in heavy.column_names if name in STREAMED])
        heavy = heavy.drop_columns(later.column_names) if later.num_columns else heavy
        tables.append(heavy)
        large.append(later)
        return Heavy(replace(light, heavy=heavy.schema), len(tables) - 1, later.schema, away)

    encoded = _map(swap, result)
    return encoded, tuple(tables), tuple(large) if any(table.num_columns for table in large) else ()


def decode_result(result: Any, heavy: ObjectRef[Any], streamed: ObjectRef[Any]) -> Any:
    """The result as the driver holds it: batches of light columns here, the others behind `heavy` and `streamed`."""

    def swap(value: Any) -> Any:
        if not isinstance(value, Heavy):
            return value
        batch = Batch.from_parts(value.light, heavy, value.item).with_away(value.away)
        if not len(value.streamed):
            return batch
        later = LightPart(pa.table({}), value.streamed, value.light.rows)
        return batch.with_away(Batch.from_parts(later, streamed, value.item).parted()[1])

    return _map(swap, result)


def _map(swap: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `swap` applied to itself and to what lists, tuples and dicts in it hold."""
    if type(value) is tuple:
        return tuple(_map(swap, item) for item in value)
    if type(value) is list:
        # Long lists are of numbers or text: only their first item is looked at.
        return [_map(swap, item) for item in value] if value and _may_hold_batch(value[0]) else value
    if type(value) is dict:
        return {key: _map(swap, item) for key, item in value.items()}
    return swap(value)


def _may_hold_batch(value: Any) -> bool:
    return isinstance(value, (Batch, Parcel, Heavy, list, tuple, dict))
