"""What an algorithm says of itself for a checkpoint, and its rows as files, which the driver never reads itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import CheckpointError
from rolegraph.tasks import on_this_node, received, sent
from rolegraph.transit import Payload, decode_arguments, encode_arguments

SHARD_ROWS = 64
"""Rows of one object in the store, when they are read back."""
SUFFIX = ".arrow"


@dataclass(frozen=True)
class State:
    """Enough to go on as if nothing had happened, together with what the roles save."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, as JSON has them."""
    rows: Mapping[str, Batch] = field(default_factory=dict)
    """Rows by name, wherever their columns are: made, and not trained on yet."""

    def beside(self, other: State) -> State:
        """Both together; their names differ."""
        return State({**self.values, **other.values}, {**self.rows, **other.rows})


async def write_rows(rows: Mapping[str, Batch], folder: Path, *, use_ray: bool) -> None:
    """Write each batch exactly as it is to `folder`; with Ray workers of this node do, and the driver fetches nothing.

    Raises OSError where the disk does not take it.
    """
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    for name, batch in rows.items():
        path = str(folder / (name + SUFFIX))
        if not use_ray:
            await asyncio.to_thread(_write, batch, path)
            continue
        payload, refs = encode_arguments("write", (batch, path), {})
        if (fault := await on_this_node(_write_task, max_retries=0).remote(payload, *refs)) is not None:
            raise OSError(fault)


async def read_rows(folder: Path, *, use_ray: bool) -> dict[str, Batch]:
    """The batches of `write_rows` by name; with Ray their heavy columns are in the object store.

    Raises CheckpointError where a file cannot be read.
    """
    found: dict[str, Batch] = {}
    for path in await asyncio.to_thread(_files, folder):
        try:
            if use_ray:
                stream = on_this_node(_read_task, num_returns="streaming", max_retries=0).remote(str(path))
                found[path.stem] = await asyncio.to_thread(_joined, stream)
            else:
                found[path.stem] = Batch.from_table(await asyncio.to_thread(_read, str(path)))
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*" + SUFFIX))


def _write(batch: Batch, path: str) -> None:
    table = batch.table
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _read(path: str) -> pa.Table:
    with pa.OSFile(path, "rb") as source:  # read, not mapped: the checkpoint may be removed meanwhile
        return pa.ipc.open_file(source).read_all()


def _write_task(payload: Payload, *objects: Any) -> str | None:
    (batch, path), _ = decode_arguments(payload, objects)
    try:
        _write(batch, path)
    except OSError as error:
        return str(error)
    return None


def _read_task(path: str) -> Iterator[Any]:
    rows = Batch.from_table(_read(path))
    yield from sent(rows.slice(start, start + SHARD_ROWS) for start in range(0, max(len(rows), 1), SHARD_ROWS))


def _joined(stream: Any) -> Batch:
    from ray.exceptions import RayTaskError

    try:
        return received(stream)
    except RayTaskError as error:
        raise OSError(str(error.cause)) from error
