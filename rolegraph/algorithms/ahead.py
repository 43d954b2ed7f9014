"""Generations made beside training: the next ones begin while earlier ones are trained on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.metrics import of_versions
from rolegraph.batch import Batch
from rolegraph.checkpoints.state import State
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
        count: generations that are still to be made: none is begun that nobody will take.
        wait: surrounds the time that `take` waits for a generation that is made beside it (a timer).
        before: those that a checkpoint had made and nobody had taken; they are taken first.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Generation]],
        staleness: Staleness,
        count: int,
        wait: Callable[[], AbstractContextManager[None]],
        before: Iterable[Generation] = (),
    ) -> None:
        self._make = make
        self._staleness = staleness
        self._count = count
        self._wait = wait
        self._tasks: asyncio.TaskGroup | None = None
        self._maker: asyncio.Task[None] | None = None
        self._made: deque[Generation] = deque(before)
        self._changed = asyncio.Event()
        """Whether generations are admitted may have."""
        self._arrived = asyncio.Event()
        """Set when a generation has been made."""

    @classmethod
    def of(
        cls, algorithm: Algorithm, make: Callable[[], Awaitable[Generation]], count: int, earlier: State | None = None
    ) -> Self:
        """Those of an algorithm whose config has `max_staleness`; what it waits for them is its phase `wait`.

        Args:
            count: generations that nobody has taken yet, those of `earlier` among them.
            earlier: what `state` said, where the run goes on from a checkpoint.
        """
        telemetry = algorithm.job.telemetry
        staleness = Staleness(algorithm.config.max_staleness)
        before = made_before(earlier)
        if earlier is not None and "staleness" in earlier.values:
            staleness.restore(earlier.values["staleness"])
        return cls(make, staleness, count - len(before), lambda: telemetry.phase("wait", "train"), before)

    def state(self) -> State:
        """Those that were made and not taken, for a checkpoint; one that is being made is forgotten."""
        return State(
            {"staleness": self._staleness.state(len(self._made)), "made": [metrics for _, metrics in self._made]},
            {f"made-{number}": samples for number, (samples, _) in enumerate(self._made)},
        )

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
                while not self._made:
                    self._arrived.clear()
                    await self._arrived.wait()
            samples, metrics = self._made.popleft()
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
            self._made.append(await self._make())
            self._arrived.set()

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
            # What ended the block came first; the task may fail of being cancelled.
            first = error if error is not None and error in faults.exceptions else faults.exceptions[0]
            raise first from None


def made_before(earlier: State | None) -> list[Generation]:
    """The generations that a checkpoint has, in the order in which they are taken."""
    if earlier is None:
        return []
    return [(earlier.rows[f"made-{number}"], metrics) for number, metrics in enumerate(earlier.values.get("made", ()))]
