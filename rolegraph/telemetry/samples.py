"""Samples as Parquet files, written by a worker: the driver never holds the tokens it saves."""

from __future__ import annotations

from pathlib import Path

from rolegraph.batch import Batch


def write_samples(batch: Batch, path: str) -> int:
    """Write all columns of a batch to one Parquet file; returns the number of rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    batch.write_parquet(path)
    return len(batch)
