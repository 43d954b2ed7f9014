"""Real actors that are killed in the middle of a call: who gets their rows, and how they come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import RoleGroup
from rolegraph.host import RoleSpec
from rolegraph.interfaces import PRMRole, SamplerRole, SamplingParams, StepReduce, TeacherRole
from rolegraph.placement import Plan
from rolegraph.recovery import Care
from rolegraph.role import Mesh, Role, endpoint
from tests.rolegraph.fakes import batch_of, is_running, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180)]


class Mortal(Role):
    """`config`: a folder. Who finds a file there that names its role and rank dies of it; the file is gone then."""

    def live_or_die(self) -> None:
        poison = Path(self.config, f"{self.context.role} {self.context.rank}")
        if poison.exists():
            poison.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Sampler(Mortal, SamplerRole):
    queue_in_flight = 2

    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        time.sleep(0.1)
        if self.context.rank == 1:
            self.live_or_die()
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})


class PRM(Mortal, PRMRole):
    def score(self, batch: Batch, *, reduce: StepReduce = "min") -> Batch:
        self.live_or_die()
        return batch.with_columns({"prm_score": np.ones(len(batch))})


class Teacher(Mortal, TeacherRole):
    """Ranks that compute together, as those on Megatron: rank 0 waits for one that is gone."""

    @endpoint(dispatch="dp")
    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        is_alone = Path(self.config, "teacher 1").exists()
        if self.context.rank == 1:
            time.sleep(1.0)  # rank 0 has looked
            self.live_or_die()
        elif is_alone:
            time.sleep(600)
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})


class Watched(Care):
    """Notes what it is told."""

    max_restarts = 2

    def __init__(self) -> None:
        self.told: list[str] = []
        self.restarts: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)

    def restarted(self, role: str) -> None:
        self.restarts.append(role)


async def pids(group: RoleGroup[Any]) -> set[int]:
    return {int(found["pid"]) for found in await group.metrics()}


async def test_replicas_are_replaced_beside_their_calls_and_ranks_that_compute_together_as_a_whole(
    tmp_path: Path,
) -> None:
    care, local, kinds = Watched(), batch_of(40), {"sampler": Sampler, "prm": PRM, "teacher": Teacher}
    plans = {
        "sampler": plan_of("sampler", 2, cores=0.2),
        "prm": plan_of("prm", 1, cores=0.2),
        "teacher": plan_of("teacher", 2, mesh=Mesh(dp=2), cores=0.2),
    }
    plan = Plan({role: each.roles[role] for role, each in plans.items()}, tuple((role,) for role in plans), "cpu")
    specs = {role: RoleSpec(kind, str(tmp_path)) for role, kind in kinds.items()}
    options = GraphOptions(exp_name=tmp_path.name, run_dir=str(tmp_path))
    async with RoleGraph(plan, specs, options, care=care) as graph:
        sampler, prm, teacher = (graph.handle(role, kind) for role, kind in kinds.items())
        before = {role: (await pids(group), [m.context for m in group.members]) for role, group in graph.groups.items()}
        for name in ("sampler 1", "prm 0", "teacher 1"):
            (tmp_path / name).touch()
        found = await asyncio.gather(
            sampler.sample(local, SamplingParams()),  # type: ignore[attr-defined]
            prm.score(local),  # type: ignore[attr-defined]
            teacher.score(local),  # type: ignore[attr-defined]
        )
        assert all(out["uid"].to_pylist() == local["uid"].to_pylist() for out in found), "every row once, in its place"
        while any(group.is_awaited for group in graph.groups.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        again = await sampler.sample(local, SamplingParams())  # type: ignore[attr-defined]
        assert set(again.numpy("served")) == {0, 1}, "rows go to the new one too"
        for role, group in graph.groups.items():
            old, contexts = before[role]
            now = await pids(group)
            assert len(now) == len(old)
            assert len(now - old) == {"sampler": 1, "prm": 1, "teacher": 2}[role]
            assert not any(is_running(pid) for pid in old - now), "two processes never share a seat"
            for was, member in zip(contexts, group.members, strict=True):
                new = member.context
                assert (new.rank, new.node, new.local_rank, new.local_world_size) == (
                    was.rank, was.node, was.local_rank, was.local_world_size,
                )  # fmt: skip
    assert sorted(care.restarts) == ["prm", "sampler", "teacher"]
    died = {role: next(text for text in care.told if text.startswith(role) and "died" in text) for role in kinds}
    assert "sampler rank 1 died: The actor died unexpectedly" in died["sampler"]
    assert all(len(text) < 500 for text in died.values())
    assert died["prm"].endswith("; prm rank 0 is started again (restart 1 of 2)")
    assert died["teacher"].endswith("; teacher with its 2 ranks is started again (restart 1 of 2)")
    assert sum("works again after" in text for text in care.told) == 3
