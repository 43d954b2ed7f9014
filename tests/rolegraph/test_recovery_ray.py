"""Real actors that are killed in the middle of a call: who gets their rows, and how they come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import RoleGroup
from rolegraph.host import RoleSpec
from rolegraph.recovery import Care
from rolegraph.role import Mesh, Role, endpoint
from tests.rolegraph.fakes import batch_of, is_running, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(120)]


class Replica(Role):
    """Says who served a row. `config`: a folder; the row whose uid a file there names kills who gets it."""

    queue_in_flight = 2

    @endpoint(dispatch="queue")
    def serve(self, batch: Batch, delay: float = 0.05) -> Batch:
        time.sleep(delay)
        poison = Path(self.config, "poison")
        if poison.exists() and poison.read_text() in batch["uid"].to_pylist():
            poison.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})


class Ranks(Role):
    """Ranks that compute together, as a teacher's on Megatron."""

    def setup(self) -> None:
        self.calls = 0

    @endpoint(dispatch="dp")
    def score(self, batch: Batch, hang: float = 0.0) -> Batch:
        poison = Path(self.config, f"poison {self.context.rank}")
        if poison.exists():
            poison.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(hang if list(Path(self.config).glob("hang")) else 0.0)
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})

    @endpoint()
    def pid(self) -> int:
        return os.getpid()


class Watched(Care):
    """Notes what it is told."""

    max_restarts = 2

    def __init__(self) -> None:
        self.told: list[str] = []
        self.restarts = 0

    def tell(self, text: str) -> None:
        self.told.append(text)

    def restarted(self, role: str) -> None:
        self.restarts += 1


@asynccontextmanager
async def running(
    folder: Path, care: Care, kind: type[Role] = Replica, ranks: int = 2, mesh: Mesh | None = None
) -> AsyncIterator[RoleGroup[Any]]:
    options = GraphOptions(exp_name=folder.name, run_dir=str(folder))
    spec = RoleSpec(kind, str(folder))
    async with RoleGraph(plan_of(ranks=ranks, mesh=mesh), {"fake": spec}, options, care=care) as graph:
        yield graph.group("fake")


async def test_a_killed_replica_is_replaced_beside_the_call_and_works_again(tmp_path: Path) -> None:
    care, local = Watched(), batch_of(60)
    async with running(tmp_path, care) as group:
        before = [member.context for member in group.members]
        (tmp_path / "poison").write_text("u2")
        calls = [asyncio.ensure_future(group.handle.serve(local.slice(a, a + 30), delay=0.2)) for a in (0, 30)]
        out = Batch.concat(await asyncio.gather(*calls))
        assert out["uid"].to_pylist() == local["uid"].to_pylist(), "every row once, in its place"
        while len(group.alive) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        later = await group.handle.serve(local, delay=0.02)
        assert set(later.numpy("served")) == {0, 1}, "rows go to the new one too"
        for old, new in zip(before, (member.context for member in group.members), strict=True):
            assert (new.rank, new.device_ids, new.node, new.local_rank, new.local_world_size) == (
                old.rank, old.device_ids, old.node, old.local_rank, old.local_world_size,
            )  # fmt: skip
    assert care.restarts == 1
    died, works = care.told
    assert "died: The actor died unexpectedly" in died
    assert len(died) < 500
    assert died.endswith("is started again (restart 1 of 2)")
    assert "works again after" in works


async def test_ranks_that_compute_together_are_started_again_together(tmp_path: Path) -> None:
    care, local = Watched(), batch_of(6)
    async with running(tmp_path, care, Ranks, mesh=Mesh(dp=2)) as group:
        before = await group.handle.pid()
        (tmp_path / "poison 1").touch()
        (tmp_path / "hang").touch()
        asked = asyncio.ensure_future(group.handle.score(local, hang=60))
        await asyncio.sleep(0.5)
        (tmp_path / "hang").unlink()
        started = time.monotonic()
        out = await asked
        assert time.monotonic() - started < 40, "nobody waits for the peer that hangs"
        after = await group.handle.pid()
        assert out["uid"].to_pylist() == local["uid"].to_pylist()
        assert not set(before) & set(after)
        assert not any(is_running(pid) for pid in before), "two processes never share a seat"
    assert care.restarts == 1
    assert "fake rank 1 died" in care.told[0]
    assert "fake with its 2 ranks is started again (restart 1 of 2)" in care.told[0]
