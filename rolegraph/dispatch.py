"""How a call on a group becomes calls on its actors, and their results one result: pure functions, no Ray."""

from __future__ import annotations

import heapq
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, RoleGraphError
from rolegraph.role import Endpoint, Mesh

AnyEndpoint = Endpoint[Any, ..., Any, Any]
Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Call:
    """What one actor is asked."""

    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Rows | None = None
    """The rows of the whole call that this part holds, or null when nothing was cut."""


def count_items(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batches and lists among the arguments, null when there are none; they must agree."""
    sizes = {f"argument {i + 1}": len(value) for i, value in enumerate(args) if isinstance(value, (Batch, list))}
    sizes |= {key: len(value) for key, value in kwargs.items() if isinstance(value, (Batch, list))}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} has {size}" for key, size in sizes.items())
        raise BatchError(f"{name}() cuts its batches and lists alike, and they differ in length: {listed}")
    return next(iter(sizes.values()), None)


def cut(args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every batch and list reduced to `rows`."""

    def part(value: Any) -> Any:
        if isinstance(value, Batch):
            return value.take(rows)
        return [value[i] for i in rows] if isinstance(value, list) else value

    return tuple(part(value) for value in args), {key: part(value) for key, value in kwargs.items()}


def contiguous_parts(count: int, parts: int) -> list[Rows]:
    """`count` rows in `parts` contiguous parts whose sizes differ by at most one, larger ones first.

    >>> [part.tolist() for part in contiguous_parts(5, 3)]
    [[0, 1], [2, 3], [4]]
    """
    return np.array_split(np.arange(count), parts)


def parts_by_cost(costs: Rows, parts: int) -> list[Rows]:
    """Rows in `parts` parts of like total cost: the dearest row goes to the cheapest part, rows stay in order within.

    >>> [part.tolist() for part in parts_by_cost(np.array([1, 9, 5, 5]), 2)]
    [[0, 1], [2, 3]]
    """
    chosen: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    for row in np.argsort(-costs, kind="stable"):
        load, size, part = heapq.heappop(heap)
        chosen[part].append(int(row))
        heapq.heappush(heap, (load + float(costs[row]), size + 1, part))
    return [np.array(sorted(rows), np.int64) for rows in chosen]


def scatter(endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[Call]:
    """The calls on the actors of a group, in rank order; no call at all when there are no items to cut.

    `queue` calls are not made here: who gets which rows depends on who has room.
    """
    options, world = endpoint.options, mesh.world_size
    if options.execute == "first":
        return [Call(0, args, kwargs)]
    if callable(options.dispatch):
        pairs = [_pair(options.dispatch(world, rank, *args, **kwargs)) for rank in range(world)]
        return [Call(rank, *pair) for rank, pair in enumerate(pairs)]
    count = None if options.dispatch == "all" else count_items(endpoint.name, args, kwargs)
    if count is None:
        return [Call(rank, args, kwargs) for rank in range(world)]
    if count == 0:
        return []
    if options.dispatch == "slice":
        parts = [(rank, rows) for rank, rows in enumerate(contiguous_parts(count, world)) if len(rows)]
        return [Call(rank, *cut(args, kwargs, rows), rows) for rank, rows in parts]
    by_dp = _dp_parts(endpoint, args, kwargs, count, mesh.dp)
    cuts = [cut(args, kwargs, rows) for rows in by_dp]
    # Ranks without rows are called too: their peers wait for them in collectives.
    dp_of = [mesh.at(rank).dp_rank for rank in range(world)]
    return [Call(rank, *cuts[dp], by_dp[dp]) for rank, dp in enumerate(dp_of)]


def _pair(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):
        return value[0], value[1]
    return (value,), {}


def _dp_parts(
    endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, parts: int
) -> list[Rows]:
    cost = endpoint.options.cost
    if cost is None or parts == 1:
        return contiguous_parts(count, parts)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Batch) and cost in value:
            return parts_by_cost(value.numpy(cost), parts)
    raise BatchError(f"{endpoint.name}() balances its rows by the column {cost!r}, which no batch given to it has")


def gather(endpoint: AnyEndpoint, calls: Sequence[Call], results: Sequence[Any], mesh: Mesh) -> Any:
    """One result of the actors' results, as the endpoint's `collect` says, in row order."""
    options = endpoint.options
    if options.execute == "first":
        return results[0]
    if options.dispatch == "dp":
        calls, results = _one_a_dp_rank(calls, results, mesh)
    if callable(options.collect):
        return options.collect(list(results))
    if options.collect == "none":
        return list(results)
    return in_row_order(endpoint.name, [call.rows for call in calls], results)


def _one_a_dp_rank(calls: Sequence[Call], results: Sequence[Any], mesh: Mesh) -> tuple[list[Call], list[Any]]:
    """Of the peers that got the same part, the first that returned something: others may return null."""
    chosen: dict[int, tuple[Call, Any]] = {}
    for call, result in zip(calls, results, strict=True):
        dp = mesh.at(call.rank).dp_rank
        if dp not in chosen or (chosen[dp][1] is None and result is not None):
            chosen[dp] = (call, result)
    ordered = [chosen[dp] for dp in sorted(chosen)]
    return [call for call, _ in ordered], [result for _, result in ordered]


def in_row_order(name: str, rows: Sequence[Rows | None], results: Sequence[Any]) -> Any:
    """Flatten results of parts, then put their rows where the parts' rows were.

    A part may return several rows for each of its own, the same number for all: they stay together.
    """
    joined = flatten(name, results)
    if any(part is None for part in rows):
        return joined
    order = np.concatenate([part for part in rows if part is not None])
    return joined if np.all(np.diff(order) > 0) else _reorder(name, joined, order)


def flatten(name: str, results: Sequence[Any]) -> Any:
    """Join batches, lists and tuples (position by position); nulls alone give null."""
    kinds = {type(result) for result in results}
    if kinds == {type(None)}:
        return None
    if len(kinds) > 1:
        raise RoleGraphError(f"{name}() returned different types to flatten: {_listed(kinds)}")
    kind = kinds.pop()
    if issubclass(kind, Batch):
        return Batch.concat(results)
    if issubclass(kind, list):
        return [item for result in results for item in result]
    if issubclass(kind, tuple):
        if len({len(result) for result in results}) > 1:
            raise RoleGraphError(f"{name}() returned tuples of different lengths to flatten")
        return tuple(flatten(name, column) for column in zip(*results, strict=True))
    hint = "a dict of numbers has no order of rows" if issubclass(kind, dict) else "only batches, lists and tuples can"
    raise RoleGraphError(
        f"{name}() returned {kind.__name__}, which cannot be flattened ({hint}): declare the endpoint with "
        "collect='none' for a list of results, or with a function that joins them"
    )


def _reorder(name: str, joined: Any, order: Rows) -> Any:
    if joined is None:
        return None
    if isinstance(joined, tuple):
        return tuple(_reorder(name, item, order) for item in joined)
    times, rest = divmod(len(joined), len(order))
    if rest:
        raise RoleGraphError(
            f"{name}() returned {len(joined)} rows for {len(order)}: the same number for each is needed to restore "
            "the order of rows"
        )
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    where = (back[:, None] * times + np.arange(times)).reshape(-1)
    return joined.take(where) if isinstance(joined, Batch) else [joined[i] for i in where]


def empty_result(endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call on no rows gives, without asking any actor: the right type, empty."""
    collect = endpoint.options.collect
    if collect == "none":
        return []
    if callable(collect):
        try:
            return collect([])
        except Exception as error:
            raise BatchError(
                f"{endpoint.name}() was given no rows, and its collect function makes nothing of no results ({error!r})"
            ) from error
    batch = next((value for value in (*args, *kwargs.values()) if isinstance(value, Batch)), None)
    kind = return_type(endpoint)
    if kind is None:  # without annotation: what was cut
        return [] if batch is None else batch.slice(0, 0)
    return _empty(kind, Batch.from_columns({}) if batch is None else batch.slice(0, 0))


def return_type(endpoint: AnyEndpoint) -> Any:
    """The annotated result of an endpoint's method, resolved where its module allows; else the text, or null."""
    try:
        return typing.get_type_hints(endpoint.fn).get("return", endpoint.annotation)
    except Exception:
        return endpoint.annotation


def returns_batch(endpoint: AnyEndpoint) -> bool:
    """Whether the annotated result holds batches: then an actor returns their heavy columns as a second value."""
    annotation = endpoint.annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return re.search(r"\bBatch\b", text) is not None


def _empty(kind: Any, batch: Batch) -> Any:
    if isinstance(kind, str):
        kind = {"Batch": Batch, "list": list}.get(kind.partition("[")[0].rpartition(".")[2], kind)
    origin = typing.get_origin(kind) or kind
    if origin in (typing.Union, types.UnionType):
        return _empty(next(arg for arg in typing.get_args(kind) if arg is not type(None)), batch)
    if origin is tuple:
        return tuple(_empty(arg, batch) for arg in typing.get_args(kind) if arg is not Ellipsis)
    if isinstance(origin, type) and issubclass(origin, Batch):
        return batch
    return [] if origin is list or origin is Sequence else None


def _listed(kinds: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))
