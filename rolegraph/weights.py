"""Moving a policy's weights from its trainer into the engines that sample from it: the driver's side.

`WeightSync` introduces the roles to each other, starts both ends of a transfer together and counts versions. What goes
over the wire between the ends is in `rolegraph.wire`. Neither knows Megatron or vLLM.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rolegraph.errors import RoleError, WeightSyncError
from rolegraph.group import group_of, is_deserted
from rolegraph.interfaces import AdapterInfo, RolloutRole, TensorInfo, TrainRole, TransferGroup
from rolegraph.wire import WeightReceiver, WeightSender, free_port

__all__ = ["WeightReceiver", "WeightSender", "WeightSync", "free_port"]

_log = logging.getLogger(__name__)

_BUSY_S = 3600.0
"""How long a new replica waits at least for a trainer that is in the middle of its steps."""
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
        adapter: send the adapter under training alone, to engines that hold the weights beside it.
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
        adapter: bool = False,
    ) -> None:
        self.version = 0
        """Of the weights that all engines hold; 0 are those they were started with, or were evaluated with at first."""
        self._has_sent = False
        self._train = train
        self._receivers = list(receivers)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._patience_s = timeout_s
        """How long the receiving side, and the driver, wait for a trainer that may be in the middle of its steps."""
        self._backend = backend
        self._drain = drain
        self._adapter = adapter
        self._adapter_info: AdapterInfo | None = None
        self._manifest: list[TensorInfo] | None = None
        self._lock = asyncio.Lock()
        """The trainer sends to one process group at a time."""
        self._connected: list[dict[int, int]] | None = None
        """The replicas of each receiver that are in the process group, and their numbers of workers."""

    async def sync(self) -> float:
        """Send the weights of now; returns seconds.

        A replica that dies meanwhile costs one more try, without it. Raises WeightSyncError, naming the role, when an
        end fails or takes longer than `timeout_s`. Both sides then leave the process group, and the next call builds a
        new one. Replicas that are being started again get the weights when they join.
        """
        return await self._bring(1)

    async def refresh(self) -> float:
        """Send the weights of now for an evaluation, without a new version; returns seconds, raises as `sync` does.

        Versions say how old the samples are that training uses: a run that is evaluated counts as one that is not.
        """
        return await self._bring(0)

    async def _bring(self, counted: int) -> float:
        started = time.monotonic()
        async with self._lock, AsyncExitStack() as stack:
            for receiver in self._receivers if self._drain else ():
                await stack.enter_async_context(group_of(receiver).drained())
            self._has_sent = True
            await self._transfer_to_the_living(self.version + counted)
            self.version += counted
        return time.monotonic() - started

    async def renew(self) -> None:
        """Send the weights of now once more, under the version that all engines have; nothing before the first sync."""
        async with self._lock:
            if self.version or self._has_sent:
                await self.close()  # one of the same rank as before is not in the group that is there
                await self._transfer_to_the_living(self.version)

    async def bring(self, receiver: RolloutRole, rank: int) -> None:
        """`renew` for one replica of a receiver, which was started again, beside the others, whatever they do.

        A trainer that is in the middle of its steps sends between two of them.
        """
        async with self._lock:
            if not (self.version or self._has_sent):
                return
            await self.close()  # the trainer can be in one
            alone = copy.copy(self)
            alone._receivers, alone._lock = [group_of(receiver).rank(rank)], asyncio.Lock()
            # The trainer itself waits for nobody as long as that: a replica may die once more.
            alone._patience_s = max(self._timeout_s, _BUSY_S)
            try:
                await alone.renew()
            except Exception:
                await alone.close()
                raise
            await alone.close()  # not where it is cancelled: the trainer may be busy for as long as the time-out

    async def _transfer_to_the_living(self, version: int) -> None:
        living = await self._living()
        try:
            await self._transfer(living, version)
        except WeightSyncError as error:
            left = await self._living()
            if left == living:
                raise
            _log.warning("%s\nonce more, with the replicas that are left", error)
            await self._transfer(left, version)

    async def _transfer(self, living: list[dict[int, int]], version: int) -> None:
        """One try with these replicas; on a fault everybody leaves the group."""
        if not any(living):
            return  # who comes back brings itself up to date
        try:
            if living != self._connected:
                # First sync, or a replica has died: the group without it is a new one.
                if self._connected is not None:
                    await self.close()
                await self._connect(living, version)
            manifest = self._manifest or []
            # Roles without adapters need not know the word.
            alone, info = {"adapter": True} if self._adapter else {}, self._adapter_info
            calls: dict[str, Awaitable[object]] = {"train": self._train.send_weights(self._bucket_bytes, **alone)}
            for name, receiver, _ in self._named(living):
                beside = {"adapter": info} if info else {}
                calls[name] = receiver.receive_weights(manifest, self._bucket_bytes, version, **beside)
            await _together(f"weight sync {version}", calls, self._patience_s)
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
        there = [receiver for receiver in self._receivers if not is_deserted(receiver)]
        leaving = [self._train.disconnect_weights(), *(receiver.disconnect_weights() for receiver in there)]
        tasks = [asyncio.ensure_future(_as_coroutine(call)) for call in leaving]
        await asyncio.wait(tasks, timeout=self._timeout_s + _GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _living(self) -> list[dict[int, int]]:
        """Of each receiver, the replicas that answer: rank to number of workers."""

        async def ask(receiver: RolloutRole) -> dict[int, int]:
            if is_deserted(receiver):
                return {}
            try:
                return dict(await receiver.transfer_workers())
            except RoleError as error:
                # Now known as dead, it is left out of the next call; with none left, that one says so.
                _log.warning("%s", error)
                return {} if is_deserted(receiver) else dict(await receiver.transfer_workers())

        return list(await asyncio.gather(*(ask(receiver) for receiver in self._receivers)))

    async def _connect(self, living: list[dict[int, int]], version: int) -> None:
        if self._adapter:
            self._manifest = await self._train.weight_manifest(adapter=True)
            self._adapter_info = await self._train.adapter_info()
        else:
            self._manifest = await self._train.weight_manifest()
        host, port = await self._train.rendezvous()
        rank, offsets = 1, []
        for workers in living:
            firsts: dict[int, int] = {}
            for replica, count in workers.items():
                firsts[replica] = rank
                rank += count
            offsets.append(firsts)
        group = TransferGroup(self._backend, host, port, rank, {}, self._timeout_s)
        calls: dict[str, Awaitable[object]] = {"train": self._train.connect_weights(group)}
        for name, receiver, index in self._named(living):
            theirs = replace(group, offsets=offsets[index], timeout_s=self._patience_s)
            calls[name] = receiver.connect_weights(theirs)
        await _together(f"connecting for weight sync {version}", calls, self._patience_s)
        self._connected = living

    def _named(self, living: list[dict[int, int]]) -> list[tuple[str, RolloutRole, int]]:
        """The receivers that have living replicas: what messages call them, and their places."""
        alone = len(self._receivers) == 1
        names = ["rollout" if alone else f"receiver {i}" for i in range(len(self._receivers))]
        return [(names[i], self._receivers[i], i) for i, workers in enumerate(living) if workers]


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
