"""Generations made beside training: the next ones begin while earlier ones are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.metrics import of_versions
from rolegraph.batch import Batch
from rolegraph.interfaces import Metrics
from rolegraph.staleness import Staleness

Generation = tuple[Batch, Metrics]


class Generations:
    """The samples of a run, generation after generation, each begun as soon as `staleness` admits it.

    With a limit of 0 that is when it is asked for, in the caller's own task. Else a task beside the block makes them;
    what fails first, the task or the block, ends both at once and is raised as it is::

        async with Generations(self.sample, Staleness(1), count=10) as generations:
            for _ in range(10):
                generations.synced(await self.sync())
                samples, metrics = await generations.take()

    Args:
        make: draws and scores one generation; called by one task, and never twice at a time.
        count: generations of the whole run: none is begun that nobody will take.
        wait: surrounds the time that `take` waits for a generation that is made beside it (a timer).
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Generation]],
        staleness: Staleness,
        count: int,
        wait: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._make = make
        self._staleness = staleness
        self._count = count
        self._wait = wait
        self._tasks: asyncio.TaskGroup | None = None
        self._maker: asyncio.Task[None] | None = None
        self._made: asyncio.Queue[Generation] = asyncio.Queue()
        self._changed = asyncio.Event()

    @classmethod
    def of(cls, algorithm: Algorithm, make: Callable[[], Awaitable[Generation]], count: int) -> Self:
        """Those of an algorithm whose config has `max_staleness`; what it waits for them is its phase `wait`."""
        telemetry = algorithm.job.telemetry
        staleness = Staleness(algorithm.config.max_staleness)
        return cls(make, staleness, count, wait=lambda: telemetry.phase("wait", "train"))

    def synced(self, version: int) -> None:
        """The engines have the weights of this version now."""
        self._staleness.synced(version)
        self._changed.set()

    async def take(self) -> Generation:
        """The next generation, to be trained on, and its metrics. Raises StalenessError for a row that is too old."""
        if self._maker is None:
            self._staleness.start()
            samples, metrics = await self._make()
        else:
            with self._wait():
                samples, metrics = await self._made.get()
        has_versions = len(samples) and "weight_version" in samples
        self._staleness.take(int(samples.numpy("weight_version").min()) if has_versions else None)
        self._changed.set()
        return samples, metrics | of_versions(samples, self._staleness.version)

    async def _run_ahead(self) -> None:
        for _ in range(self._count):
            while not self._staleness.admits:
                self._changed.clear()
                await self._changed.wait()
            self._staleness.start()
            self._made.put_nowait(await self._make())

    async def __aenter__(self) -> Self:
        if self._staleness.limit:
            self._tasks = await asyncio.TaskGroup().__aenter__()
            self._maker = self._tasks.create_task(self._run_ahead(), name="generations")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks is None or self._maker is None:
            return
        self._maker.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
