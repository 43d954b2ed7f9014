"""`RoleGraph`: starts the groups of a plan side by side, hands out their handles, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rolegraph.cluster import Cluster
from rolegraph.errors import RoleError, RoleGraphError
from rolegraph.futures import refuse_in_loop, run_sync, watch
from rolegraph.group import OnCall, RoleGroup
from rolegraph.host import RoleSpec, last_line
from rolegraph.launch import WATCH_EVERY_S, GraphOptions, Launcher
from rolegraph.member import Member
from rolegraph.placement import Plan
from rolegraph.recovery import Care, Rescue
from rolegraph.reservation import Reservation
from rolegraph.role import Role

__all__ = ["GraphOptions", "OnReady", "RoleGraph"]

R = TypeVar("R", bound=Role)

OnReady = Callable[[str, Role], Awaitable[None]]
"""`on_ready(role, handle)`."""

PORT_ATTEMPTS = 3
"""Launches of a role whose rendezvous port another process took first."""
TEARDOWN_S = 3.0
"""Seconds that roles get to tear down; what is not done by then is killed."""

_log = logging.getLogger(__name__)


def _interrupt(*_: object) -> None:
    """Do what Ctrl-C does, also where it does nothing: a shell lets the background jobs of a script ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


class RoleGraph:
    """The running roles of one plan.

    Use it as `async with RoleGraph(...) as graph` (or plain `with`), and take handles by `graph.handle(name, Class)`.
    However the block ends, Ctrl-C and SIGTERM included, every actor, child process and reserved device is freed.
    """

    def __init__(
        self,
        plan: Plan,
        roles: Mapping[str, RoleSpec],
        options: GraphOptions | None = None,
        *,
        on_call: OnCall | None = None,
        on_ready: OnReady | None = None,
        reservation: Reservation | None = None,
        care: Care | None = None,
    ) -> None:
        """`reservation`: one that holds the devices of the roles already, and goes on to when the graph stops.

        `on_ready(role, handle)` is awaited for each role once it is set up. With it, roles that share GPUs start one
        after another, so that each can make room for the next: engines look at the free memory when they start.

        `care` says what becomes of actors that die; without it they are left out for good.
        """
        if odd := set(plan.roles) ^ set(roles):
            raise RoleGraphError(f"plan and roles differ in: {', '.join(sorted(odd))}")
        self.plan = plan
        self.roles = dict(roles)
        self.options = options or GraphOptions()
        self.on_call = on_call
        self.on_ready = on_ready
        self.groups: dict[str, RoleGroup[Any]] = {}
        self.startup: dict[str, float] = {}
        """Seconds from the start of the graph until each role was ready."""
        self._cluster: Cluster | None = None
        self._began = 0.0
        """When the start began, `time.time()`."""
        self._lent = reservation
        self._care = care
        self._launcher = Launcher(plan, self.roles, self.options)
        self._old_sigterm: Any = None

    def handle(self, role: str, kind: type[R]) -> R:
        """The typed handle of a role: `kind` is its class or a base of it."""
        group = self.group(role)
        if not issubclass(group.role_class, kind):
            raise RoleGraphError(f"role {role} is a {group.role_class.__name__}, not a {kind.__name__}")
        return cast(R, group.handle)

    def group(self, role: str) -> RoleGroup[Any]:
        """The group of a role."""
        if role not in self.groups:
            raise RoleGraphError(f"no running role {role!r}; there are: {', '.join(self.groups) or 'none'}")
        return self.groups[role]

    async def start(self) -> None:
        """Start all roles side by side; when one fails, everything is freed and its error raised."""
        began, self._began = time.perf_counter(), time.time()
        try:
            if self.options.use_ray:
                cores = sum(slot.cores for slots in self.plan.roles.values() for slot in slots)
                self._cluster = Cluster.connect(cores)
            self._catch_sigterm()  # After Ray, which has a handler of its own.
            if self.options.use_ray:
                self._launcher.reservation = self._lent
                if self._lent is None:
                    self._launcher.reservation = Reservation(self.plan, self.options.exp_name)
                    await self._launcher.reservation.take(self.options.timeout_s)
                self._launcher.ship_code()
            locks = {group: asyncio.Lock() for group in self.plan.groups}
            launches = [asyncio.ensure_future(self._start_in_turn(role, began, locks)) for role in self.plan.roles]
            started: asyncio.Future[Any] = asyncio.gather(*launches)
            # Of a start that is broken off nobody asks for its error.
            started.add_done_callback(lambda done: done.cancelled() or done.exception())
            watcher: asyncio.Future[Any] = asyncio.ensure_future(self._watch_nodes())
            try:
                await asyncio.wait([started, watcher], return_when=asyncio.FIRST_COMPLETED)
                groups = await (started if started.done() else watcher)
            finally:
                # When one role has failed the others still run.
                for task in (started, watcher, *launches):
                    task.cancel()
            self.groups = dict(zip(self.plan.roles, groups, strict=True))
            self._take_care()
        except BaseException:
            await self._free(teardown=False)
            raise

    def _take_care(self) -> None:
        """Have the groups start their dead again, where that is possible."""
        care = self._care
        if care is None or not care.max_restarts or not self.options.use_ray:
            return
        for role, group in self.groups.items():
            if group.role_class.can_be_replaced:
                group.rescue(
                    Rescue(
                        max_restarts=care.max_restarts,
                        start=partial(self._launcher.again, group),
                        join=partial(care.join, role),
                        tell=care.tell,
                        restarted=partial(care.restarted, role),
                        in_turn=care.in_turn(role),
                    )
                )

    async def start_again(self, role: str) -> list[Member]:
        """New members for all ranks of a role, on their seats and set up; those of now are killed first."""
        group = self.group(role)
        return await self._launcher.again(group, range(group.world_size))

    async def stop(self) -> None:
        """Tear down, kill and free everything; safe to call again."""
        await self._free(teardown=True)

    async def _start_in_turn(
        self, role: str, began: float, locks: Mapping[tuple[str, ...], asyncio.Lock]
    ) -> RoleGroup[Any]:
        waits = self.on_ready is not None and self.plan.roles[role][0].device == "cuda"
        async with locks[self.plan.group_of(role)] if waits else nullcontext():
            group = await self._start_role(role, began)
            if self.on_ready is not None:
                await self.on_ready(role, group.handle)
        return group

    async def _start_role(self, role: str, began: float) -> RoleGroup[Any]:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            members = self._launcher.members(role)
            group: RoleGroup[Any] = RoleGroup(
                self.roles[role].role_class,
                members,
                self.plan.roles[role][0].mesh,
                is_deterministic=self.options.deterministic,
                on_call=self.on_call,
            )
            try:
                await self._launcher.set_up(group)
            except RoleError as error:
                if "address already in use" not in error.message.lower() or attempt == PORT_ATTEMPTS:
                    raise
                _log.warning("the rendezvous port of %s was taken by another process; starting it again", role)
                for member in members:
                    member.kill()
                continue
            self.startup[role] = time.perf_counter() - began
            return group
        raise AssertionError("the loop returns or raises")

    def still_starting(self) -> list[str]:
        """The roles that are not ready, each with the last line of its log where that can be read from here."""
        found = []
        for role in self.plan.roles:
            if role in self.startup:
                continue
            logs = [member.log_file for member in self._launcher.launched if member.context.role == role]
            last = next((line for log in logs if (line := last_line(log, since=self._began))), "")
            found.append(role + (f" (its log ends: {last[:120]})" if last else ""))
        return found

    async def _watch_nodes(self) -> None:
        """Raise when a node leaves while roles start: an actor that waits for a place there would wait for ever."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._launcher.reservation is not None:
                self._launcher.reservation.raise_for_lost_nodes()

    async def _free(self, *, teardown: bool) -> None:
        """Everything that was started, in the reverse order; each step has its time, none stops the next."""
        groups, self.groups = self.groups, {}
        launched, self._launcher.launched = self._launcher.launched, []
        try:
            for group in groups.values():
                if group.recovery is not None:
                    await group.recovery.close()
            if teardown and groups:
                stops = [asyncio.ensure_future(group.stop()) for group in groups.values()]
                done, late = await asyncio.wait(stops, timeout=TEARDOWN_S)
                for stop in late:
                    stop.cancel()
                for stop in done:
                    if (error := stop.exception()) is not None:
                        _log.warning("teardown: %s", error)
            ends = [watch(member.end_children().future) for member in launched if member.alive]
            if ends:
                # A member that does not answer hangs or is gone.
                await asyncio.wait(ends, timeout=1.0)
        finally:
            for member in launched:
                member.kill()
            reservation, self._launcher.reservation = self._launcher.reservation, None
            if reservation is not None and reservation is not self._lent:
                reservation.release()
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.stop()
            self._launcher.forget()
            self._restore_sigterm()

    def _catch_sigterm(self) -> None:
        """SIGTERM ends the program the way Ctrl-C does, so that it frees what it holds."""
        if threading.current_thread() is threading.main_thread():
            self._old_sigterm = signal.signal(signal.SIGTERM, _interrupt)

    def _restore_sigterm(self) -> None:
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        refuse_in_loop()
        run_sync(self.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_sync(self.stop())
