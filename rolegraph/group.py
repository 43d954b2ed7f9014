"""`RoleGroup`: all actors of one role behind one typed handle."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from rolegraph.dispatch import (
    AnyEndpoint,
    Call,
    count_items,
    empty_result,
    gather,
    scatter,
)
from rolegraph.errors import BatchError, RoleError, RoleGraphError
from rolegraph.futures import failed, refuse_in_loop, run_sync, watch
from rolegraph.host import tail
from rolegraph.member import Member, Sent, block
from rolegraph.queueing import feed
from rolegraph.recovery import Recovery, Rescue
from rolegraph.role import Mesh, Role, endpoints, make_handle

R = TypeVar("R", bound=Role)
T = TypeVar("T")

OnCall = Callable[[str, str, int, int | None], Callable[[], None]]
"""`on_call(role, endpoint, rank, rows)` before each actor's part of a call; what it returns is called, in any thread,
when that part has ended."""

CAUSE_GRACE_S = 2.0
"""Seconds to wait for the error behind an error that looks like the echo of a dead peer."""

_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|gloo|nccl|process ?group|barrier"
    r"|timed? ?out|socket",
    re.IGNORECASE,
)
_log = logging.getLogger(__name__)


class RoleGroup(Generic[R]):
    """The actors of one role.

    `handle` is what driver programs hold; `group_of(handle)` leads back here.
    """

    def __init__(
        self,
        role_class: type[R],
        members: Sequence[Member],
        mesh: Mesh,
        *,
        is_deterministic: bool = False,
        on_call: OnCall | None = None,
    ) -> None:
        self.role = members[0].context.role
        self.role_class = role_class
        self.members = list(members)
        """By rank; with a recovery, new ones take the places of the dead."""
        self.mesh = mesh
        self.is_deterministic = is_deterministic
        self.on_call = on_call
        self.are_replicas = any(_is_queued(endpoint) for endpoint in endpoints(role_class).values())
        """Whether members work each by itself (they take rows from a queue), so that others go on when one dies."""
        self._starting: list[Sent] = []
        self.handle: R = make_handle(role_class, self)
        self.in_flight: set[asyncio.Future[Any]] = set()
        """Calls of queues that members work on now."""
        self.gate: asyncio.Event | None = None
        """Set when rows that are held back may be sent again; None while none are."""
        self.recovery: Recovery | None = None
        """Starts the dead again; null where they are left out for good."""

    @property
    def world_size(self) -> int:
        """Actors of the role, dead ones included."""
        return len(self.members)

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that work: no call has found them dead, and those that were started again have joined."""
        recovery = self.recovery
        found = [rank for rank, member in enumerate(self.members) if member.alive]
        return tuple(found if recovery is None else filter(recovery.works, found))

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who is not alive may come back."""
        return self.recovery is not None and self.recovery.is_awaited

    def rescue(self, rescue: Rescue) -> None:
        """From now on, start again what dies: replicas one by one, ranks that compute together as a whole."""
        ranks = range(self.world_size)
        units = [(rank,) for rank in ranks] if self.are_replicas else [tuple(ranks)]
        self.recovery = Recovery(self.role, units, self.members, rescue)

    def of(self, members: Sequence[Member]) -> RoleGroup[R]:
        """A group of the same role that has these members: some of its ranks, or others for all of them."""
        mesh = self.mesh if len(members) == self.world_size else Mesh()
        return RoleGroup(self.role_class, members, mesh, is_deterministic=self.is_deterministic, on_call=self.on_call)

    def rank(self, rank: int) -> R:
        """A handle on one actor alone: a group of one, whatever an endpoint's dispatch."""
        return self.of([self.members[rank]]).handle

    def submit(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """Send the call's parts now; the future gives its collected result."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RoleGraphError(
                f"{endpoint.name}() was called without an event loop: call {endpoint.name}.sync(...) to block, or run "
                "the program with asyncio.run()"
            ) from None
        return loop.create_task(self._start(endpoint, args, kwargs), name=f"{self.role}.{endpoint.name}")

    def submit_sync(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send the call and block for its collected result."""
        refuse_in_loop()
        if _is_queued(endpoint):
            return run_sync(self._start(endpoint, args, kwargs))
        calls = self._calls(endpoint, args, kwargs)
        if not calls:
            return empty_result(endpoint, args, kwargs)
        sent = [self.send(endpoint, call) for call in calls]
        results = block(sent)
        if results is None:
            return run_sync(self._collect(endpoint, calls, sent))
        return gather(endpoint, calls, results, self.mesh)

    async def metrics(self) -> list[dict[str, Any]]:
        """Of each living actor: pid, rss and peak_rss in bytes, and its running endpoints with their seconds so far."""
        sent = [(member, member.metrics()) for member in self.members if member.alive]
        return [await self._result(member, one, "metrics") for member, one in sent]

    async def health(self, timeout_s: float = 5.0) -> list[bool]:
        """Of each actor: whether its control lane answers within `timeout_s` seconds."""
        asked = {rank: watch(self.members[rank].metrics().future) for rank in self.alive}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        for rank, call in asked.items():
            if failed(call):
                self.explain(self.members[rank], cast(Any, call.exception()), "health")
        return [rank in asked and asked[rank].done() and not failed(asked[rank]) for rank in range(self.world_size)]

    async def start(self) -> float:
        """Set up every member side by side; returns the seconds of the slowest."""
        self._starting = [member.start() for member in self.members]
        return float(max(await self.together(self._starting, "setup")))

    def not_ready(self) -> list[Member]:
        """Members that are not set up yet; all before `start`."""
        if not self._starting:
            return list(self.members)
        return [member for member, sent in zip(self.members, self._starting, strict=True) if not sent.future.done()]

    async def explain_slow_start(self, message: str, answer_s: float = 2.0) -> RoleError:
        """An error about the first member that is not set up: where it is, where it hangs, and the end of its log."""
        late = self.not_ready() or list(self.members)
        first, others = late[0], [str(member.context.rank) for member in late[1:]]
        asked = watch(first.where().future)
        await asyncio.wait([asked], timeout=answer_s)
        stack, log = ("", "") if not asked.done() or failed(asked) else asked.result()
        parts = [message + (f"; nor have ranks {', '.join(others)}" if others else ""), stack, log]
        if not stack:
            parts.append(tail(first.log_file) or "Its process does not answer")
        context = first.context
        text = "\n".join(part for part in parts if part)
        return RoleError(
            text, at=time.time(), role=context.role, rank=context.rank, node=context.node, endpoint="setup"
        )

    async def stop(self) -> None:
        """Tear down every living member side by side."""
        living = [member for member in self.members if member.alive]
        await asyncio.gather(*(self._result(member, member.stop(), "teardown") for member in living))

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Hold back the rows of queues that no member has begun, and wait for the others; the block's end sends them.

        Of this event loop only, one block at a time.
        """
        gate = self.gate = asyncio.Event()
        try:
            while self.in_flight:
                await asyncio.wait(self.in_flight)
            yield
        finally:
            self.gate = None
            gate.set()

    def _start(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Send what can be sent now, and return what waits for the rest."""
        if _is_queued(endpoint):
            count = count_items(endpoint.name, args, kwargs)
            if count is None:
                raise BatchError(f"{endpoint.name}() takes its rows from a queue and was given no batch or list")
            return _value(empty_result(endpoint, args, kwargs)) if not count else feed(self, endpoint, args, kwargs)
        if self.recovery is not None and not self.reached():
            return self._start_later(self.recovery, endpoint, args, kwargs)
        calls = self._calls(endpoint, args, kwargs)
        if not calls:
            return _value(empty_result(endpoint, args, kwargs))
        sent = [self.send(endpoint, call) for call in calls]
        return self._collect(endpoint, calls, sent)

    async def _start_later(
        self, recovery: Recovery, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The call, once there is somebody to answer it."""
        await recovery.somebody()
        if not self.reached():
            raise self.nobody_left(endpoint)
        return await self._start(endpoint, args, kwargs)

    def reached(self) -> list[int]:
        """Ranks that calls reach: the living ones of replicas, for each works by itself, and else all or none."""
        recovery, living = self.recovery, [rank for rank, member in enumerate(self.members) if member.alive]
        if recovery is None:
            return living if self.are_replicas else list(range(self.world_size))
        found = [rank for rank in living if recovery.answers(rank)]
        return found if self.are_replicas or len(found) == self.world_size else []

    def _calls(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
        """The call's parts; what goes to all replicas, or to the first, goes to the living ones."""
        calls = scatter(endpoint, args, kwargs, self.mesh)
        if not self.are_replicas or endpoint.options.dispatch != "all":
            return calls
        reached = self.reached()
        if not reached:
            raise self.nobody_left(endpoint)
        if endpoint.options.execute == "first":
            return [replace(call, rank=reached[0]) for call in calls]
        return [call for call in calls if call.rank in reached]

    def nobody_left(self, endpoint: AnyEndpoint, message: str = "no replica is left", last: Any = None) -> RoleError:
        """The error of a call that nobody is left for, with what the last of them died of."""
        last = last or (self.recovery.last if self.recovery is not None else None)
        if last is None:
            return RoleError(message, role=self.role, endpoint=endpoint.name)
        return RoleError(f"{message}; the last error: {last.message}", **last.parts)

    def explain(self, member: Member, error: BaseException, name: str) -> RoleError:
        """An error of a call as the driver shows it; a member that it says is dead is started again where it can be."""
        failure = member.explain(error, name)
        if not member.alive and self.recovery is not None:
            self.recovery.died(member, failure)
        return failure

    def send(self, endpoint: AnyEndpoint, call: Call) -> Sent:
        member = self.members[call.rank]
        if self.on_call is None:
            return member.send(endpoint, call.args, call.kwargs)
        rows = None if call.rows is None else len(call.rows)
        ended = self.on_call(self.role, endpoint.name, member.context.rank, rows)
        try:
            sent = member.send(endpoint, call.args, call.kwargs)
        except BaseException:
            ended()
            raise
        sent.future.add_done_callback(lambda _: ended())
        return sent

    async def _collect(self, endpoint: AnyEndpoint, calls: Sequence[Call], sent: Sequence[Sent]) -> Any:
        members = [self.members[call.rank] for call in calls]
        try:
            results = await self.together(sent, endpoint.name, members)
        except RoleError:
            # Ranks that compute together are asked again as a whole; so is a first replica, by way of the next one.
            is_whole = not self.are_replicas or endpoint.options.execute == "first"
            if self.recovery is None or not is_whole or all(member.alive for member in members):
                raise
            await self.recovery.somebody()
            if not self.reached():
                raise
            again = [replace(call, rank=self.reached()[0]) for call in calls] if self.are_replicas else calls
            return await self._collect(endpoint, again, [self.send(endpoint, call) for call in again])
        return gather(endpoint, calls, results, self.mesh)

    async def together(self, sent: Sequence[Sent], name: str, members: Sequence[Member] = ()) -> list[Any]:
        """Results of calls that belong together; raises as soon as one of them has failed."""
        futures = [watch(one.future) for one in sent]
        if len(futures) > 1:
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        elif futures:
            await asyncio.wait(futures)
        if any(failed(future) for future in futures):
            raise await self._cause(futures, members or self.members, name) from None
        return [one.decode(future.result()) for one, future in zip(sent, futures, strict=True)]

    async def _cause(self, futures: Sequence[asyncio.Future[Any]], members: Sequence[Member], name: str) -> RoleError:
        """The failure that came first, not the echo it had in the ranks that were waiting for the failed one."""
        deadline = time.monotonic() + CAUSE_GRACE_S
        while True:
            pairs = zip(futures, members, strict=True)
            failures = [self.explain(member, cast(Any, f.exception()), name) for f, member in pairs if failed(f)]
            first = min(failures, key=lambda failure: (_is_echo(failure), failure.at))
            pending = [future for future in futures if not future.done()]
            left = deadline - time.monotonic()
            if not _is_echo(first) or not pending or left <= 0:
                break
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            # Their errors are known, or come too late to matter: nobody else will ask for them.
            future.cancel()
        return first

    async def _result(self, member: Member, sent: Sent, name: str) -> Any:
        try:
            return sent.decode(await watch(sent.future))
        except Exception as error:
            raise self.explain(member, error, name) from None


def is_deserted(handle: Role) -> bool:
    """Whether no call would reach anybody of a role now, and somebody may come back: a call would wait for that."""
    group = handle.__dict__.get("_calls")
    return isinstance(group, RoleGroup) and group.is_awaited and not group.reached()


def group_of(handle: R) -> RoleGroup[R]:
    """The group behind a handle."""
    group = handle.__dict__.get("_calls")
    if not isinstance(group, RoleGroup):
        raise RoleGraphError(f"{type(handle).__name__} is a role in its actor, not a handle on a group")
    return group


async def _value(value: T) -> T:
    return value


def _is_queued(endpoint: AnyEndpoint) -> bool:
    return endpoint.options.dispatch == "queue" and endpoint.options.execute == "all"


def _is_echo(failure: RoleError) -> bool:
    """Whether the error reads like that of a rank whose peer is gone."""
    return "the actor died" not in failure.message and _ECHO.search(failure.message) is not None
