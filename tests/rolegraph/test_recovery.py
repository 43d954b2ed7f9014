"""What becomes of calls and of the dead, with members that run in this process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import ray.exceptions

import rolegraph.health
from rolegraph.batch import Batch
from rolegraph.errors import RoleError
from rolegraph.member import RayMember
from rolegraph.recovery import reason
from rolegraph.role import Mesh, Role, RoleContext, endpoint
from tests.rolegraph.fakes import batch_of
from tests.rolegraph.mortals import Colony, Mortal


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolegraph.health, "BACKOFF_S", 0.05)


class Replica(Role):
    """Dies of the row whose uid its config names, so many times."""

    queue_in_flight = 2
    colony: Colony
    member: Mortal

    def setup(self) -> None:
        self.joined = 0

    def die_on(self, uids: list[str]) -> None:
        poison: dict[str, int] = self.colony.config or {}
        for uid in uids:
            if poison.get(uid, 0):
                poison[uid] -= 1
                self.member.die()

    @endpoint(dispatch="queue")
    def serve(self, batch: Batch, delay: float = 0.01) -> Batch:
        time.sleep(delay)
        self.die_on(batch["uid"].to_pylist())
        served = {"served": np.full(len(batch), self.context.rank), "joined": np.full(len(batch), self.joined)}
        return batch.with_columns(served)

    @endpoint()
    def join(self, value: int) -> int:
        self.joined = value
        return self.context.rank

    @endpoint(execute="first")
    def head(self) -> int:
        self.die_on(["head"])
        return self.context.rank

    @endpoint()
    def fail(self) -> None:
        raise ValueError("its own")


class Ranks(Replica):
    """Ranks that compute together."""

    @endpoint(dispatch="dp")
    def serve(self, batch: Batch, delay: float = 0.01) -> Batch:  # type: ignore[override]
        if self.context.rank == 1:
            self.die_on(["all"])
        elif self.colony.config and self.colony.config.pop("hang", 0):
            time.sleep(5.0)
        return batch.with_columns({"served": np.full(len(batch), self.context.rank)})


async def healthy(colony: Colony) -> None:
    async with asyncio.timeout(5):
        while colony.group.is_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_replica_is_replaced_beside_the_call_and_rows_go_to_it_again() -> None:
    colony = Colony(Replica, config={"u3": 1})
    group, local = colony.rescue(), batch_of(30)
    old = list(group.members)
    out = await group.handle.serve(local)
    await healthy(colony)
    assert out["uid"].to_pylist() == local["uid"].to_pylist(), "every row once, in its place"
    assert group.alive == (0, 1)
    assert colony.restarts == 1
    assert sum(a is not b for a, b in zip(old, group.members, strict=True)) == 1
    assert set((await group.handle.serve(local, delay=0.02)).numpy("served")) == {0, 1}
    died, works = colony.told
    assert died.endswith("died: killed; " + died.split(" died")[0] + " is started again (restart 1 of 2)")
    assert works.startswith(died.split(" died")[0] + " works again after ")


async def test_without_a_rescue_the_dead_are_left_out() -> None:
    colony = Colony(Replica, config={"u3": 1})
    out = await colony.group.handle.serve(batch_of(30))
    assert out["uid"].to_pylist() == batch_of(30)["uid"].to_pylist()
    assert len(colony.group.alive) == 1
    assert not colony.group.is_awaited


async def test_a_call_waits_for_the_only_replica_and_fails_with_its_error_once_it_is_given_up() -> None:
    colony = Colony(Replica, ranks=1, config={"u2": 1})
    group, local = colony.rescue(max_restarts=2), batch_of(5)
    out = await group.handle.serve(local)
    assert out["uid"].to_pylist() == local["uid"].to_pylist()
    colony.config["u1"] = 10
    with pytest.raises(RoleError, match=r"no replica is left for \d of 5 rows; the last error: the actor died: killed"):
        await group.handle.serve(local)
    with pytest.raises(RoleError, match="no replica is left; the last error: the actor died: killed"):
        await group.handle.join(1)
    assert colony.restarts == 2
    assert colony.told[-1].endswith("it is left out from now on, health.max_restarts=2 is used up")


async def test_every_call_that_waits_hears_of_a_change() -> None:
    colony = Colony(Replica, ranks=1)
    recovery = colony.rescue().recovery
    assert recovery is not None
    first = recovery.change()
    recovery._tell_change()
    second = recovery.change()  # asked for in the moment of a change, as calls side by side do
    assert first.done()
    assert not second.done()
    for _ in range(100):
        recovery.change().cancel()
    await asyncio.sleep(0)
    assert recovery._waiters == {second}, "those that wait no more are forgotten"
    recovery._tell_change()
    assert await asyncio.wait_for(second, 5)


async def test_others_do_the_rows_where_one_is_given_up() -> None:
    colony = Colony(Replica, config={"u3": 1})
    group = colony.rescue(max_restarts=0)
    assert len(await group.handle.serve(batch_of(30))) == 30
    assert len(group.alive) == 1
    assert colony.told[0].endswith("died: killed; it is left out from now on")


async def test_a_start_that_fails_is_tried_again() -> None:
    colony = Colony(Replica, ranks=1, config={"u3": 1})
    colony.fails = 2
    group = colony.rescue(max_restarts=3)
    assert len(await group.handle.serve(batch_of(5))) == 5
    assert colony.restarts == 3
    assert "fake rank 0 died: no weights here; fake rank 0 is started again (restart 2 of 3)" in colony.told
    colony.config["u3"] = 1
    with pytest.raises(RoleError, match=r"no replica is left for \d of 5 rows; the last error: the actor died: killed"):
        await group.handle.serve(batch_of(5))


async def test_calls_without_a_queue_wait_for_the_only_replica_or_go_to_the_next_one() -> None:
    colony = Colony(Replica, config={"head": 1})
    group = colony.rescue()
    assert await group.handle.head() == 1
    await healthy(colony)
    for member in colony.group.members:
        member.die()  # type: ignore[attr-defined]
    with pytest.raises(RoleError, match="the actor died"):
        await group.handle.join(3)
    assert group.alive == ()
    assert await group.handle.join(3), "the next call waits for somebody"


async def test_a_new_replica_gets_no_row_before_it_has_joined() -> None:
    colony = Colony(Replica, config={"u0": 1})
    seen: list[Any] = []

    async def join(ranks: tuple[int, ...]) -> None:
        await asyncio.sleep(0.1)
        seen.append((ranks, colony.group.alive))
        await colony.group.rank(ranks[0]).join(7)

    group = colony.rescue(join=join)
    await group.handle.join(7)
    out = await group.handle.serve(batch_of(60))
    await healthy(colony)
    again = await group.handle.serve(batch_of(10))
    assert set(out.numpy("joined")) == set(again.numpy("joined")) == {7}
    ((ranks, alive),) = seen
    assert sorted(ranks + alive) == [0, 1]


async def test_one_that_dies_while_it_joins_is_started_once_more() -> None:
    colony = Colony(Replica, ranks=1, config={"u0": 1})

    async def join(ranks: tuple[int, ...]) -> None:
        if colony.restarts == 1:
            colony.group.members[0].die()  # type: ignore[attr-defined]
        await colony.group.rank(0).join(7)

    group = colony.rescue(join=join)
    await group.handle.join(7)
    assert set((await group.handle.serve(batch_of(3))).numpy("joined")) == {7}
    assert colony.restarts == 2


async def test_what_joining_fails_of_is_told_to_the_caller_and_the_next_call_tries_again() -> None:
    colony = Colony(Replica, ranks=1, config={"u1": 1})
    faults = [ValueError("no weights for it")]

    async def join(ranks: tuple[int, ...]) -> None:
        if faults:
            raise faults.pop()

    group = colony.rescue(join=join)
    with pytest.raises(ValueError, match="no weights for it"):
        await group.handle.serve(batch_of(3))
    assert group.alive == ()
    assert len(await group.handle.serve(batch_of(3))) == 3
    assert colony.restarts == 1


async def test_in_turn_nobody_is_started_outside_of_a_call_and_a_call_ends_after_it() -> None:
    colony = Colony(Replica, config={"u1": 1})

    async def join(ranks: tuple[int, ...]) -> None:
        async with colony.group.drained():
            assert sorted(await colony.group.handle.join(5)) == [0, 1], "calls to all reach who joins"

    group = colony.rescue(join=join, in_turn=True)
    out = await group.handle.serve(batch_of(6), delay=0.0)
    assert (group.alive, colony.restarts) == ((0, 1), 1)
    assert out["uid"].to_pylist() == batch_of(6)["uid"].to_pylist()
    group.members[1].die()  # type: ignore[attr-defined]
    with pytest.raises(RoleError, match="the actor died"):
        await group.handle.join(6)
    await asyncio.sleep(0.2)
    assert colony.restarts == 1
    assert await group.handle.join(6) == [0]
    assert len(await group.handle.serve(batch_of(2), delay=0.0)) == 2
    assert (group.alive, colony.restarts) == ((0, 1), 2)


async def test_ranks_that_compute_together_are_started_again_together() -> None:
    colony = Colony(Ranks, config={"all": 1, "hang": 1}, mesh=Mesh(dp=2))
    group = colony.rescue()
    old = list(group.members)
    started = time.monotonic()
    out = await group.handle.serve(batch_of(6))
    assert time.monotonic() - started < 3, "nobody waits for the peer that hangs"
    assert out["uid"].to_pylist() == batch_of(6)["uid"].to_pylist()
    assert not set(map(id, old)) & set(map(id, group.members))
    assert all(member.kill_calls for member in old), "two processes never share a seat"  # type: ignore[attr-defined]
    assert colony.told[0] == ("fake rank 1 died: killed; fake with its 2 ranks is started again (restart 1 of 2)")


async def test_an_error_of_its_own_is_no_death() -> None:
    colony = Colony(Replica)
    with pytest.raises(RoleError, match="its own"):
        await colony.rescue().handle.fail()
    assert colony.group.alive == (0, 1)
    assert colony.told == []


async def test_a_restart_that_is_broken_off_is_made_later_and_does_not_count() -> None:
    colony = Colony(Replica, ranks=1, config={"u0": 1})
    gate = asyncio.Event()

    async def join(ranks: tuple[int, ...]) -> None:
        await gate.wait()

    group = colony.rescue(join=join, max_restarts=1)
    call = asyncio.ensure_future(group.handle.serve(batch_of(2)))
    while colony.restarts == 0 or len(colony.made) == 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert group.recovery is not None
    await group.recovery.close()
    assert not colony.made[-1].alive
    gate.set()
    assert len(await call) == 2
    assert len(colony.made) == 3


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.ActorUnavailableError("the node is slow", None),
        ray.exceptions.OutOfMemoryError("the node ran out of memory"),
        ray.exceptions.NodeDiedError("the node is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_way_in_which_ray_says_that_an_actor_is_gone_is_a_death(error: Exception) -> None:
    member = RayMember(None, RoleContext(role="orm", rank=2))  # type: ignore[arg-type]
    told = member.explain(error, "score")
    assert not member.alive
    assert (told.role, told.rank) == ("orm", 2)
    assert told.message.startswith("the actor died: ")
    alive = RayMember(None, RoleContext(role="orm"))  # type: ignore[arg-type]
    assert "the call failed in Ray" in alive.explain(ray.exceptions.ObjectStoreFullError("full"), "score").message
    assert alive.alive


def test_a_reason_is_one_short_line() -> None:
    ray_says = (
        "the actor died: The actor is dead. Exit detail: End of file. Some common causes include: (1) much\nEnd of log"
    )
    assert reason(ray_says) == "The actor is dead. Exit detail: End of file"
    assert len(reason("x" * 1000)) == 300
    assert reason("") == "nobody knows why"
