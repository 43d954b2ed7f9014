"""Moving a policy's weights from its trainer into the engines that sample from it: the driver's side.

`WeightSync` introduces the roles to each other, starts both ends of a transfer together and counts versions. What goes
over the wire between the ends is in `rolegraph.wire`. Neither knows Megatron or vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rolegraph.errors import RoleError, WeightSyncError
from rolegraph.group import group_of
from rolegraph.interfaces import RolloutRole, TensorInfo, TrainRole, TransferGroup
from rolegraph.wire import WeightReceiver, WeightSender, free_port

__all__ = ["WeightReceiver", "WeightSender", "WeightSync", "free_port"]

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How long the other roles may still take to report after the first has failed."""


class WeightSync:
    """Brings the weights of `train` into every engine of `receivers`, connecting on first use.

    >>> sync = WeightSync(train, [rollout], timeout_s=120)   # doctest: +SKIP
    >>> seconds = await sync.sync()                          # doctest: +SKIP

    Args:
        bucket_bytes: how much travels in one broadcast; both ends hold about two buckets beside the weights.
        timeout_s: the longest that connecting, one collective, or a whole sync may take.
        backend: gloo (host memory, any device), nccl (devices of their own), ipc (one device shared by both roles).
        drain: finish the samples that engines have begun before new weights come, and hold others back meanwhile; else
            those go on with the new weights.
    """

    def __init__(
        self,
        train: TrainRole,
        receivers: Sequence[RolloutRole],
        *,
        bucket_bytes: int = 128 * 2**20,
        timeout_s: float = 300.0,
        backend: str = "gloo",
        drain: bool = False,
    ) -> None:
        self.version = 0
        """Of the weights that all engines hold; 0 are those they were started with."""
        self._train = train
        self._receivers = list(receivers)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._backend = backend
        self._drain = drain
        self._manifest: list[TensorInfo] | None = None
        self._connected: list[dict[int, int]] | None = None
        """The replicas of each receiver that are in the process group, and their numbers of workers."""

    async def sync(self) -> float:
        """Send the weights of now; returns seconds.

        A replica that dies meanwhile costs one more try, without it. Raises WeightSyncError, naming the role, when an
        end fails or takes longer than `timeout_s`. Both sides then leave the process group, and the next call builds a
        new one.
        """
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            for receiver in self._receivers if self._drain else ():
                await stack.enter_async_context(group_of(receiver).drained())
            await self._transfer_to_the_living()
        self.version += 1
        return time.monotonic() - started

    async def _transfer_to_the_living(self) -> None:
        living = await self._living()
        try:
            await self._transfer(living)
        except WeightSyncError as error:
            left = await self._living()
            if left == living:
                raise
            _log.warning("%s\nonce more, with the replicas that are left", error)
            await self._transfer(left)

    async def _transfer(self, living: list[dict[int, int]]) -> None:
        """One try with these replicas; on a fault everybody leaves the group."""
        version = self.version + 1
        try:
            if living != self._connected:
                # First sync, or a replica has died: the group without it is a new one.
                if self._connected is not None:
                    await self.close()
                await self._connect(living)
            manifest = self._manifest or []
            calls: dict[str, Awaitable[object]] = {"train": self._train.send_weights(self._bucket_bytes)}
            for name, receiver in self._named():
                calls[name] = receiver.receive_weights(manifest, self._bucket_bytes, version)
            await _together(f"weight sync {version}", calls, self._timeout_s)
        except Exception:
            await self.close()
            raise
        except BaseException:  # cancelled: the run is ending, and the roles may be busy for as long as their time-out
            self._connected = None
            raise

    async def close(self) -> None:
        """Make both sides leave the process group; roles that are gone are passed over."""
        self._connected = None
        self._manifest = None
        leaving = [self._train.disconnect_weights(), *(r.disconnect_weights() for r in self._receivers)]
        tasks = [asyncio.ensure_future(_as_coroutine(call)) for call in leaving]
        await asyncio.wait(tasks, timeout=self._timeout_s + _GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self) -> list[dict[int, int]]:
        """Of each receiver, the replicas that answer: rank to number of workers."""

        async def ask(receiver: RolloutRole) -> dict[int, int]:
            try:
                return dict(await receiver.transfer_workers())
            except RoleError as error:
                # Now known as dead, it is left out of the next call; with none left, that one says so.
                _log.warning("%s", error)
                return dict(await receiver.transfer_workers())

        return list(await asyncio.gather(*(ask(receiver) for receiver in self._receivers)))

    async def _connect(self, living: list[dict[int, int]]) -> None:
        self._manifest = await self._train.weight_manifest()
        host, port = await self._train.rendezvous()
        offsets: list[dict[int, int]] = []
        rank = 1
        for workers in living:
            firsts = {}
            for replica, count in workers.items():
                firsts[replica] = rank
                rank += count
            offsets.append(firsts)
        group = TransferGroup(self._backend, host, port, rank, {}, self._timeout_s)
        calls: dict[str, Awaitable[object]] = {"train": self._train.connect_weights(group)}
        for (name, receiver), firsts in zip(self._named(), offsets, strict=True):
            calls[name] = receiver.connect_weights(replace(group, offsets=firsts))
        await _together(f"connecting for weight sync {self.version + 1}", calls, self._timeout_s)
        self._connected = living

    def _named(self) -> list[tuple[str, RolloutRole]]:
        if len(self._receivers) == 1:
            return [("rollout", self._receivers[0])]
        return [(f"receiver {i}", receiver) for i, receiver in enumerate(self._receivers)]


async def _as_coroutine(call: Awaitable[object]) -> object:
    return await call


async def _together(what: str, calls: dict[str, Awaitable[object]], timeout_s: float) -> None:
    """Wait for all calls; raises WeightSyncError with the faults in the order in which they happened."""
    faults: dict[str, BaseException] = {}

    async def run(name: str, call: Awaitable[object]) -> None:
        try:
            await call
        except Exception as error:
            faults[name] = error
            raise

    tasks = {name: asyncio.ensure_future(run(name, call)) for name, call in calls.items()}
    try:
        _, pending = await asyncio.wait(
            tasks.values(), timeout=timeout_s + _GRACE_S, return_when=asyncio.FIRST_EXCEPTION
        )
        if faults and pending:
            await asyncio.wait(pending, timeout=_GRACE_S)
        silent = [name for name, task in tasks.items() if not task.done()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if not faults and not silent:
        return
    lines = [f"{name}: {error}" for name, error in faults.items()]
    lines += [f"{name}: " + ("still busy" if faults else f"no answer after {timeout_s:g} s") for name in silent]
    raise WeightSyncError(f"{what} failed\n  " + "\n  ".join(lines)) from next(iter(faults.values()), None)
