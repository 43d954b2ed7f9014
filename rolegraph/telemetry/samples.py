"""Samples as Parquet files. With Ray a worker writes them: the driver never holds the tokens it saves."""

from __future__ import annotations

from typing import Any

from rolegraph.batch import Batch
from rolegraph.transit import decode_arguments, encode_arguments


def save_here(batch: Batch, path: str) -> None:
    """Write all columns of a batch to one Parquet file, in this process."""
    batch.fetch_sync().write_parquet(path)


def save_in_task(batch: Batch, path: str) -> None:
    """Have a Ray worker write the batch; returns at once."""
    import ray

    payload, refs = encode_arguments((batch, path), {})
    ray.remote(_save).options(num_cpus=0).remote(payload, *refs)


def _save(payload: Any, *objects: Any) -> None:
    (batch, path), _ = decode_arguments(payload, objects)
    batch.write_parquet(path)
