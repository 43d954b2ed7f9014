"""Calls whose rows replicas take from a queue as they have room, and what becomes of the rows of the dead."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, cast

from rolegraph.dispatch import AnyEndpoint, Call, Rows, contiguous_parts, count_items, cut, gather
from rolegraph.errors import RoleError
from rolegraph.futures import failed, watch
from rolegraph.member import Member, Sent
from rolegraph.recovery import reason

if TYPE_CHECKING:
    from rolegraph.group import RoleGroup

_log = logging.getLogger(__name__)


async def feed(group: RoleGroup[Any], endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Feed rows to replicas as they have room; the rows of a replica that dies are fed to another, or to its successor.

    Raises RoleError where nobody is left for them and nobody comes back, and what an endpoint raised by itself.
    """
    call = _Feeding(group, endpoint, args, kwargs)
    while call.waiting or call.running:
        if group.recovery is not None:
            group.recovery.begin()
        call.send()
        await call.wait()
    if group.recovery is not None and group.recovery.rescue.in_turn:
        # What was started takes memory of devices that others have in the next turn.
        await group.recovery.somebody()
    call.done.sort(key=lambda pair: int(cast(Any, pair[0].rows)[0]))
    return gather(endpoint, [part for part, _ in call.done], [result for _, result in call.done], group.mesh)


class _Feeding:
    """The state of one such call."""

    def __init__(
        self, group: RoleGroup[Any], endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.group, self.endpoint, self.args, self.kwargs = group, endpoint, args, kwargs
        self.count = count_items(endpoint.name, args, kwargs) or 0
        kind, workers = group.role_class, len(group.alive) or group.world_size
        rows_a_call = max(1, kind.queue_rows, kind.queue_rows_alone if workers == 1 else 1)
        self.limit = 1 if group.is_deterministic else max(1, kind.queue_in_flight)
        # Small batches are shared as well: no replica idles while another has them all.
        parts = workers if group.is_deterministic else max(-(-self.count // rows_a_call), workers)
        self.waiting: deque[Rows] = deque(part for part in contiguous_parts(self.count, parts) if len(part))
        self.running: dict[asyncio.Future[Any], tuple[Call, Sent, Member]] = {}
        self.done: list[tuple[Call, Any]] = []
        self.load: Counter[int] = Counter()
        self.lost: dict[int, tuple[int, str]] = {}
        """By rank, how many rows it did not answer and why, until all its parts have come back."""
        self.last: RoleError | None = None

    def send(self) -> None:
        """Give waiting rows to those that have room."""
        group, load = self.group, self.load
        while (
            group.gate is None and self.waiting and (room := [rank for rank in group.alive if load[rank] < self.limit])
        ):
            rank = min(room, key=lambda rank: load[rank])
            rows = self.waiting.popleft()
            call = Call(rank, *cut(self.args, self.kwargs, rows), rows)
            sent = group.send(self.endpoint, call)
            self.running[watcher := watch(sent.future)] = (call, sent, group.members[rank])
            group.in_flight.add(watcher)
            watcher.add_done_callback(group.in_flight.discard)
            load[rank] += 1

    async def wait(self) -> None:
        """Return when a part has ended, or something else has changed that lets rows be sent."""
        group = self.group
        if not self.running and group.gate is not None:
            await group.gate.wait()
            return
        if not self.running and not group.alive and not group.is_awaited:
            lost = sum(len(rows) for rows in self.waiting)
            raise group.nobody_left(self.endpoint, f"no replica is left for {lost} of {self.count} rows", self.last)
        changed = None if group.recovery is None else group.recovery.change()
        try:
            events = [*self.running, *([changed] if changed is not None else [])]
            finished, _ = await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if changed is not None:
                changed.cancel()
        for future in finished & self.running.keys():
            self._take(future)
        for rank in [rank for rank in self.lost if not self.load[rank]]:  # once for all parts of a rank
            role, (count, why) = self.group.role, self.lost.pop(rank)
            _log.warning("%s rank %d: unanswered rows go back to the queue (%d): %s", role, rank, count, why)

    def _take(self, future: asyncio.Future[Any]) -> None:
        """Keep a part's result, or put the rows of one that died back in front, and count them."""
        call, sent, member = self.running.pop(future)
        self.load[call.rank] -= 1
        if not failed(future):
            self.done.append((call, sent.decode(future.result())))
            return
        self.last = self.group.explain(member, cast(Any, future.exception()), self.endpoint.name)
        if member.alive:
            raise self.last from None
        before, _ = self.lost.get(call.rank, (0, ""))
        self.lost[call.rank] = before + len(cast(Any, call.rows)), reason(self.last.message)
        self.waiting.appendleft(cast(Any, call.rows))
