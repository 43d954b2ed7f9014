"""Scores responses with reward functions in worker processes, under a deadline, one bad row never spoiling another.

Whatever goes wrong in a function is a null reward with a reason, never a 0 and never an exception of the caller:

| reason | the function |
|---|---|
| timeout | did not answer in time, or its call's time was used up by other rows |
| crash | took its process down (a signal, an exit, out of memory) |
| exception | raised |
| not_a_list, wrong_length | returned something else than one value a completion |
| none, not_a_number, not_finite | gave None, something else than a number, or NaN or an infinity for this row |
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rolegraph.errors import RewardError
from rolegraph.interfaces import FAULT_REASONS
from rolegraph.parcel import local_path
from rolegraph.rewards.config import FunctionSpec, RewardConfig
from rolegraph.rewards.nursery import Nursery, Worker
from rolegraph.rewards.registry import Wants
from rolegraph.rewards.worker import Call, Fault, Scored, Setup

log = logging.getLogger(__name__)

_FIRST_SHARE = 0.5
_LEAST_SHARE = 0.25


class Budget:
    """The time one function may still spend on one call's rows, in seconds. Thread-safe."""

    def __init__(self, seconds: float, rows: int) -> None:
        self._left = seconds
        self._rows = rows
        self._lock = threading.Lock()

    def take_all_rows(self) -> float:
        """The limit for all rows in one call: half, so that rows can be tried alone; everything for a single row."""
        with self._lock:
            limit = self._left * (_FIRST_SHARE if self._rows > 1 else 1.0)
            self._left -= limit
            return limit

    def take_row(self) -> float:
        """The limit for one row alone: an equal share of what is left, or a quarter of it where that is more."""
        with self._lock:
            limit = max(self._left / max(1, self._rows), self._left * _LEAST_SHARE)
            self._left -= limit
            self._rows -= 1
            return limit

    def give_back(self, seconds: float) -> None:
        """Return what a call did not use."""
        with self._lock:
            self._left += max(0.0, seconds)


class Lane:
    """Some workers and a thread for each, that calls wait for."""

    def __init__(self, nursery: Nursery, workers: int, start_timeout_s: float, name: str) -> None:
        self._workers = [Worker(nursery, start_timeout_s) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)

    def start(self) -> list[Wants]:
        """Start every worker; returns what the functions want."""
        started: list[list[Wants]] = list(self._threads.map(lambda worker: worker.start(), self._workers))
        return started[0]

    def submit(self, call: Call, budget: Budget, *, alone: bool) -> Future[Scored | Fault]:
        """Queue a call; its time counts from when a worker, started anew where the last is lost, has it."""
        return self._threads.submit(self._run, call, budget, alone)

    def _run(self, call: Call, budget: Budget, alone: bool) -> Scored | Fault:
        worker = self._idle.get()
        try:
            worker.send(call)
            limit = budget.take_row() if alone else budget.take_all_rows()
            reply, used = worker.answer(limit)
            budget.give_back(limit - used)
            return reply
        except (RewardError, EOFError, OSError) as error:
            return Fault("crash", f"the worker could not be replaced: {error}")
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Take no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass
class Scores:
    """One function's rewards: a number a row, or None with the reason why not."""

    values: list[float | None]
    reasons: list[str | None]
    steps: list[list[float | None]] = field(default_factory=list)
    """Of functions that score steps, in place of values: a list a row, as long as the function made it."""

    @property
    def codes(self) -> list[int]:
        """[rows] 0 where there is a reward, else 1 + the index of the reason in `FAULT_REASONS`.

        What stands behind a colon in a reason is detail.
        """
        known = {reason: index for index, reason in enumerate(FAULT_REASONS, 1)}
        words = [reason and reason.partition(":")[0] for reason in self.reasons]
        return [0 if word is None else known.get(word, known["other"]) for word in words]


@dataclass
class _Job:
    """One function on one call's rows."""

    function: int
    rows: range
    budget: Budget
    first: Future[Scored | Fault]
    alone: list[Future[Scored | Fault]] = field(default_factory=list)


class VerifierPool:
    """Worker processes for the functions of one config. `score` may be called from many threads.

    Example:
        with VerifierPool(RewardConfig(reward_funcs=["exact_match"]), workers=2) as pool:
            pool.score(["4"], {"answer": ["4"]})["exact_match"].values  # [1.0]
    """

    def __init__(self, config: RewardConfig, workers: int = 1) -> None:
        config = replace(config, external_plugins=[local_path(plugin) for plugin in config.external_plugins])
        if problems := config.problems():
            raise RewardError("\n".join(problems))
        self.functions: tuple[FunctionSpec, ...] = config.functions()
        self._config = config
        targets = tuple((f.target, dict(f.kwargs)) for f in self.functions)
        setup = Setup(targets, tuple(config.external_plugins), config.scores_steps)
        self._nursery = Nursery(setup, config.start_timeout_s)
        self._plain = Lane(self._nursery, config.workers or max(1, workers), config.start_timeout_s, "verifier")
        self._async = Lane(self._nursery, config.async_workers, config.start_timeout_s, "async-verifier")
        self._wants: list[Wants] = []
        self._faults: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the workers and load every function. Raises RewardError, with the traceback, when one cannot be."""
        try:
            self._wants = self._plain.start()
        except BaseException:
            self.close()
            raise

    def wanted(self, available: Sequence[str]) -> list[str]:
        """The columns, of those available, that some function takes. Raises RewardError for one that is missing."""
        wanted: set[str] = set()
        for spec, wants in zip(self.functions, self._wants, strict=True):
            if missing := wants.missing(available):
                raise RewardError(
                    f"reward function {spec.target!r} wants the column {missing[0]!r}, which the rows do not have "
                    f"(they have: {', '.join(sorted(available))}); rename one by data.columns"
                )
            wanted.update(wants.select(available))
        return [name for name in available if name in wanted]

    def score(self, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> dict[str, Scores]:
        """Rewards of each function by name. `columns` hold one value a completion, which is a text.

        For the functions of a config that scores steps a completion is a list of them.
        """
        if not self._wants:
            self.start()
        self.wanted(list(columns))
        jobs = [job for index in range(len(self.functions)) for job in self._submit(index, completions, columns)]
        for job in jobs:
            if isinstance(job.first.result(), Fault) and len(job.rows) > 1:
                lane = self._lane(job.function)
                job.alone = [
                    lane.submit(
                        self._call(job.function, range(row, row + 1), completions, columns), job.budget, alone=True
                    )
                    for row in job.rows
                ]
        scores = {spec.name: Scores([], []) for spec in self.functions}
        for job in jobs:
            spec = self.functions[job.function]
            for future in job.alone or [job.first]:
                self._collect(spec, future.result(), scores[spec.name], len(job.rows) if not job.alone else 1)
        return scores

    def _submit(self, index: int, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[_Job]:
        size = self._config.rows_per_call
        jobs = []
        for start in range(0, len(completions), size):
            rows = range(start, min(start + size, len(completions)))
            budget = Budget(self._config.timeout_s, len(rows))
            first = self._lane(index).submit(self._call(index, rows, completions, columns), budget, alone=False)
            jobs.append(_Job(index, rows, budget, first))
        return jobs

    def _call(self, index: int, rows: range, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Call:
        names = self._wants[index].select(columns)
        part = slice(rows.start, rows.stop)
        return Call(index, list(completions[part]), {name: list(columns[name][part]) for name in names})

    def _lane(self, index: int) -> Lane:
        return self._async if self._wants[index].is_async else self._plain

    def _collect(self, spec: FunctionSpec, reply: Scored | Fault, scores: Scores, rows: int) -> None:
        if isinstance(reply, Fault):
            scores.values += [None] * rows
            scores.steps += [[] for _ in range(rows)] if self._config.scores_steps else []
            scores.reasons += [reply.reason] * rows
            self._count(spec, reply.reason, rows, reply.detail)
            return
        scores.values += reply.values
        scores.steps += reply.steps
        scores.reasons += reply.reasons
        for reason, number in Counter(reason for reason in reply.reasons if reason).items():
            self._count(spec, reason, number, "")

    def _count(self, spec: FunctionSpec, reason: str, rows: int, detail: str) -> None:
        with self._lock:
            before = self._faults[spec.name, reason]
            self._faults[spec.name, reason] = after = before + rows
        # The first one in full, then at each power of ten: a function that always fails must not flood the log.
        if before == 0 or len(str(after)) > len(str(before)):
            log.warning("reward %s gave no reward for %d rows so far: %s %s", spec.name, after, reason, detail)

    def faults(self) -> dict[tuple[str, str], int]:
        """Rows without a reward so far, by function name and reason."""
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        """End all processes. Calls that still wait get nothing."""
        self._plain.close()
        self._async.close()
        self._nursery.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def weighted(scores: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Weighted sum a row over the rewards that are there; None where none is."""
    rows = zip(*scores.values(), strict=True)
    factors = [weights[name] for name in scores]
    return [
        None
        if all(value is None for value in row)
        else sum(factor * value for factor, value in zip(factors, row, strict=True) if value is not None)
        for row in rows
    ]
