"""Starting again what has died, beside the calls of its group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from rolegraph.errors import RoleError
from rolegraph.futures import failed, watch
from rolegraph.health import Health, State
from rolegraph.member import Member

Ranks = tuple[int, ...]

MOST_REASON = 300
"""Characters."""
ANSWER_S = 5.0
"""How long an actor may take to say that it lives."""

_log = logging.getLogger(__name__)


async def _nothing(ranks: Ranks) -> None:
    return None


@dataclass(frozen=True)
class Rescue:
    """What a group may do about its dead."""

    max_restarts: int
    start: Callable[[Ranks], Awaitable[Sequence[Member]]]
    """Kills what is left of these ranks, and gives new members on their seats, set up."""
    join: Callable[[Ranks], Awaitable[None]] = _nothing
    """Gives new members what they need to work as the others do."""
    tell: Callable[[str], None] = _log.warning
    """Told what died and what became of it."""
    restarted: Callable[[], None] = lambda: None
    """Called for each restart."""
    in_turn: bool = False
    """Whether members have their devices in a turn alone: nothing is started outside of a call of the group, and no
    call ends before what was started has ended."""


class Care:
    """What a run does about actors that die; a base that starts them again, and has nothing to give them."""

    max_restarts: int = 3
    """Of each replica, and of each group that computes together."""

    async def join(self, role: str, ranks: Ranks) -> None:
        """Give new actors of a role what they need to work as the others do."""

    def tell(self, text: str) -> None:
        """Somebody died, or works again."""
        _log.warning(text)

    def restarted(self, role: str) -> None:
        """An actor of a role is being started again."""

    def in_turn(self, role: str) -> bool:
        """Whether the role has its devices in its turn alone; see `Rescue`."""
        return False


class Recovery:
    """Who of a group is healthy, and the tasks that start its dead again.

    All of it belongs to one event loop.

    Args:
        units: the ranks that are started together: one each of replicas, all of a group that computes together.
        members: the group's members, by rank; new ones take the places of the dead.
    """

    def __init__(
        self,
        role: str,
        units: Sequence[Ranks],
        members: list[Member],
        rescue: Rescue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.units = list(units)
        self.rescue = rescue
        self.health = [Health(rescue.max_restarts) for _ in units]
        self.last: RoleError | None = None
        """What the last death was like."""
        self._members = members
        self._clock = clock
        self._unit_of = {rank: unit for unit, ranks in enumerate(units) for rank in ranks}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[bool]] = set()
        """Who is told of the next change, each by a future of its own."""
        self._fault: Exception | None = None
        self._one_at_a_time = asyncio.Lock()
        self._began: dict[int, float] = {}
        for health in self.health:
            health.started()
            health.joined()

    # ----- who is there -----

    def works(self, rank: int) -> bool:
        """Whether it may be given rows."""
        return self._state(rank) is State.HEALTHY

    def answers(self, rank: int) -> bool:
        """Whether calls to everybody reach it: one that joins takes part in what it joins by."""
        state = self._state(rank)
        return state is State.HEALTHY or (state is State.JOINING and self.rescue.in_turn)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody may come back."""
        return any(health.may_return for health in self.health)

    def _state(self, rank: int) -> State:
        return self.health[self._unit_of[rank]].state

    # ----- what becomes of the dead -----

    def died(self, member: Member, error: RoleError) -> None:
        """A call has found a member dead. One whose place another has taken is no news."""
        rank = member.context.rank
        if self._members[rank] is not member:
            return
        unit = self._unit_of[rank]
        if self.health[unit].state is not State.HEALTHY:
            return  # who starts it finds out
        self._note_death(unit, error)
        if not self.rescue.in_turn:
            self._begin()

    def begin(self) -> None:
        """Start again what can be; raises what the last try to bring somebody in has failed of."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        self._begin()

    def _begin(self) -> None:
        for unit, health in enumerate(self.health):
            if health.state in (State.DEAD, State.JOINING) and unit not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._bring_back(unit), name=f"{self.role} starts again")
                self._tasks[unit] = task
                task.add_done_callback(lambda _, unit=unit: self._tasks.pop(unit, None))  # type: ignore[misc]

    def change(self) -> asyncio.Future[bool]:
        """Done when the state of a unit has changed since it was asked for."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)  # one that is cancelled waits no more
        return waiter

    def _tell_change(self) -> None:
        for waiter in tuple(self._waiters):
            if not waiter.done():
                waiter.set_result(True)

    async def somebody(self) -> None:
        """Return once somebody is healthy, or nobody is awaited any more; where turns count, once nobody is."""
        self.begin()
        while self.is_awaited:
            if not self.rescue.in_turn and any(health.state is State.HEALTHY for health in self.health):
                return
            await self.change()
            self.begin()

    async def close(self) -> None:
        """Break off what is being started; `begin` starts it once more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fault = None

    async def _bring_back(self, unit: int) -> None:
        health = self.health[unit]
        # Where members have their devices in a turn alone, one joins while all that there are rest; a second would be
        # one that takes memory meanwhile, and must not move roles out from under the first.
        alone = self._one_at_a_time if self.rescue.in_turn else contextlib.nullcontext()
        try:
            async with alone:
                while health.state in (State.DEAD, State.JOINING):
                    await (self._start(unit) if health.state is State.DEAD else self._join(unit))
        except asyncio.CancelledError:
            if health.state in (State.STARTING, State.JOINING):
                self._kill(unit)
                health.withdraw()
            raise
        except Exception as error:
            self._fault = error
        finally:
            self._tell_change()

    async def _start(self, unit: int) -> None:
        """One try to start a dead unit."""
        health, ranks = self.health[unit], self.units[unit]
        await asyncio.sleep(health.wait_s(self._clock()))
        self._began[unit] = self._clock()
        health.restart(self._began[unit])
        self.rescue.restarted()
        try:
            members = await self.rescue.start(ranks)
        except RoleError as error:
            self._note_death(unit, error)
            return
        for rank, member in zip(ranks, members, strict=True):
            self._members[rank] = member
        health.started()

    async def _join(self, unit: int) -> None:
        """Give a new unit what it needs; where it dies meanwhile, it is dead as others are. Other faults are raised."""
        health = self.health[unit]
        fault: Exception | None = None
        try:
            await self.rescue.join(self.units[unit])
        except Exception as error:
            fault = error
        # Asked in any case: what brings all engines up to date passes over those that die meanwhile.
        if (death := await self._death(unit)) is not None:
            self._note_death(unit, fault if isinstance(fault, RoleError) else death)
            return
        if fault is not None:
            raise fault
        health.joined()
        seconds, most = self._clock() - self._began[unit], self.rescue.max_restarts
        self.rescue.tell(f"{self._name(unit)} works again after {seconds:.1f} s (restart {health.restarts} of {most})")

    async def _death(self, unit: int) -> RoleError | None:
        """How a unit that was just started has died; null where it lives."""
        for rank in self.units[unit]:
            member = self._members[rank]
            asked = watch(member.metrics().future)
            await asyncio.wait([asked], timeout=ANSWER_S)
            if failed(asked):
                error = member.explain(cast(Exception, asked.exception()), "setup")
                if not member.alive:
                    return error
        return None

    def _note_death(self, unit: int, error: RoleError) -> None:
        health, most = self.health[unit], self.rescue.max_restarts
        health.died()
        self.last = error
        self._kill(unit)  # what is left of it: others wait for the dead one in collectives
        who = self._name(unit) if error.rank is None else f"{self.role} rank {error.rank}"
        if health.state is State.GIVEN_UP:
            after = "it is left out from now on" + (f", health.max_restarts={most} is used up" if most else "")
        else:
            after = f"{self._name(unit)} is started again (restart {health.restarts + 1} of {most})"
        self.rescue.tell(f"{who} died: {reason(error.message)}; {after}")
        self._tell_change()

    def _kill(self, unit: int) -> None:
        for rank in self.units[unit]:
            with contextlib.suppress(Exception):  # it may be gone
                self._members[rank].kill()

    def _name(self, unit: int) -> str:
        ranks = self.units[unit]
        return f"{self.role} rank {ranks[0]}" if len(ranks) == 1 else f"{self.role} with its {len(ranks)} ranks"


def reason(message: str) -> str:
    """What an error says of a death, on one short line: Ray's advice about all the reasons there can be is left out."""
    line = (message.splitlines() or [""])[0].removeprefix("the actor died: ").partition(" Some common causes")[0]
    line = line.rstrip(" .") or "nobody knows why"
    return line if len(line) <= MOST_REASON else line[: MOST_REASON - 3] + "..."
