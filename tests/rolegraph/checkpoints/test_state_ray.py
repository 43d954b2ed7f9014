"""Rows of a checkpoint are written and read by workers: the driver fetches none of their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray

from rolegraph.batch import Batch, bytes_held
from rolegraph.checkpoints.state import SHARD_ROWS, read_rows, write_rows

pytestmark = pytest.mark.ray


async def test_rows_go_to_a_file_and_come_back_without_passing_the_driver(ray_cluster: None, tmp_path: Path) -> None:
    count = SHARD_ROWS + 6
    ids = [np.arange(n % 5, dtype=np.int32) for n in range(count)]
    local = Batch.from_columns({"uid": [f"u{n}" for n in range(count)], "response_ids": ids})
    light, heavy = local.to_parts()
    rows = Batch.from_parts(light, ray.put(heavy)).take(range(count - 1, -1, -1))
    before = bytes_held()
    await write_rows({"samples": rows}, tmp_path / "rows", use_ray=True)
    found = (await read_rows(tmp_path / "rows", use_ray=True))["samples"]
    assert not found.is_local
    assert found["uid"].to_pylist() == local["uid"].to_pylist()[::-1]
    assert bytes_held() == before
    assert [row.tolist() for row in (await found.fetch()).lists("response_ids")] == [row.tolist() for row in ids[::-1]]


async def test_a_fault_of_the_worker_is_one_of_the_disk(ray_cluster: None, tmp_path: Path) -> None:
    rows = Batch.from_columns({"uid": ["a"], "response_ids": [[1]]}).share()
    (tmp_path / "rows" / "samples.arrow").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        await write_rows({"samples": rows}, tmp_path / "rows", use_ray=True)
