"""A train group that has lost a rank is started again as a whole, and the run goes on from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from rolegraph.algorithms.hooks import Hook
from rolegraph.care import RunCare
from rolegraph.errors import RoleError
from rolegraph.futures import failed, watch
from rolegraph.graph import RoleGraph
from rolegraph.group import RoleGroup
from rolegraph.health import Health, State
from rolegraph.recovery import ANSWER_S, reason
from rolegraph.role import Role
from rolegraph.turns import TurnTaker

IDLE_S = 30.0
"""How long the other roles may take to end what they still do for the algorithm that failed."""

STRAGGLE_S = 60.0
"""How long ranks may take to leave a call that has failed on another."""
LOOK_EVERY_S = 0.2


async def end_stragglers(handle: Role, calls: Collection[str], tell: Callable[[str], None]) -> bool:
    """Kill the ranks that stay in one of these collective calls, which has failed on another; whether there were some.

    They wait for a rank that has left, and whatever is asked of them waits behind it. The next call finds them dead.
    """
    group = handle.__dict__.get("_calls")
    if not isinstance(group, RoleGroup) or group.world_size == 1:
        return False
    late, until = list(group.members), time.monotonic() + STRAGGLE_S
    while late and time.monotonic() < until:
        living = [member for member in group.members if member.alive]
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await group.metrics()
        except RoleError:
            return False  # one has died, and the next call finds that out
        except TimeoutError:
            continue
        late = [member for member, one in zip(living, found, strict=True) if set(calls) & set(one.get("busy", ()))]
        if late:
            await asyncio.sleep(LOOK_EVERY_S)
    for member in late:
        member.kill()
    if late:
        ranks = ", ".join(str(member.context.rank) for member in late)
        tell(f"{group.role}: ranks {ranks} still wait for one that has failed, and are ended")
    return bool(late)


class TrainGroup:
    """The ranks of `train`, which live and die together: the others wait for a dead one in collectives.

    What a trainer has learnt is not in its config, so that a new group takes it from a checkpoint; engines and teachers
    stay, and are brought up to date by the first sync.
    """

    def __init__(self, graph: RoleGraph, turns: TurnTaker, care: RunCare) -> None:
        self.health = Health(care.max_restarts)
        self.health.started()
        self.health.joined()
        self._graph = graph
        self._turns = turns
        self._care = care

    async def has_died(self) -> RoleError | None:
        """How a rank of it has died; null where all are there, or nothing is trained."""
        group = self._graph.groups.get("train")
        if group is None:
            return None
        asked = [watch(member.metrics().future) for member in group.members]
        await asyncio.wait(asked, timeout=ANSWER_S)
        deaths = []
        for member, call in zip(group.members, asked, strict=True):
            if failed(call):
                error = member.explain(cast(Exception, call.exception()), "metrics")
                deaths += [] if member.alive else [error]
            call.cancel()
        return deaths[0] if deaths else None

    def may_restart(self, death: RoleError, going_on: str) -> bool:
        """Take note of a death, and say what comes of it; false where it was the last one."""
        self.health.died()
        most = self._care.max_restarts
        if self.health.state is State.GIVEN_UP:
            after = "and the run ends" + (f": health.max_restarts={most} is used up" if most else "")
        else:
            after = f"the train group is started again (restart {self.health.restarts + 1} of {most}), {going_on}"
        self._care.tell(f"train rank {death.rank} died: {reason(death.message)}; {after}")
        return self.health.state is not State.GIVEN_UP

    async def end(self, hooks: Sequence[Hook]) -> None:
        """Kill the ranks that are left, and end what hangs on them."""
        for member in self._graph.group("train").members:
            with contextlib.suppress(Exception):  # it may be gone
                member.kill()
        for hook in hooks:
            await hook.broken_off()

    async def restart(self) -> None:
        """Start all ranks on their seats, once nobody works for the algorithm that failed.

        Raises the RoleError of the last start where none succeeds.
        """
        began = time.monotonic()
        group: RoleGroup[Any] = self._graph.group("train")
        await self._settle()
        await self._turns.make_room("train")
        while True:
            await asyncio.sleep(self.health.wait_s(time.monotonic()))
            self.health.restart(time.monotonic())
            self._care.restarted("train")
            try:
                group.members[:] = await self._graph.start_again("train")
            except RoleError as error:
                if not self.may_restart(error, "once more"):
                    raise
                continue
            break
        self._turns.turns.started_anew("train")
        self.health.started()
        self.health.joined()
        self._care.tell(f"train runs again after {time.monotonic() - began:.1f} s")

    async def _settle(self) -> None:
        """Wait until nobody works for the algorithm that failed any more."""
        groups = [group for role, group in self._graph.groups.items() if role != "train"]
        for group in groups:
            if group.recovery is not None:
                await group.recovery.close()  # some wait for weights of a trainer that is gone
        if self._care.sync is not None:
            await self._care.sync.close()
        if self._care.rollout is not None and self._care.rollout.reached():
            with contextlib.suppress(RoleError):  # who died meanwhile is found out by the next call
                await self._care.rollout.handle.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                for group in groups:
                    async with group.drained():
                        pass
