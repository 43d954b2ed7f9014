"""Sampling graphs: candidates of every dataset row, scored while later ones are drawn, and the best of them kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.algorithms import metrics as measure
from rolegraph.algorithms import sampling_folder, sampling_summary
from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.algorithms.sampling_results import NOT_PASSED_ON, SAMPLE, Part, Results, cached, candidate_of
from rolegraph.algorithms.scorers import TOTAL
from rolegraph.algorithms.selection import data_part
from rolegraph.batch import Batch
from rolegraph.config.turn_rules import takes_no_device, tenants_beside
from rolegraph.errors import DataError
from rolegraph.interfaces import Metrics, ORMRole, PRMRole, SamplerRole
from rolegraph.journal import Journal
from rolegraph.json_rows import EXACT, Row
from rolegraph.results import write_json
from rolegraph.role import Role

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.run import Run

AHEAD = 2
"""Calls of the sampler at a time: while one ends, its last rows one by one, the next one has the engines busy."""
IN_FLIGHT = 4
"""Batches that are drawn, scored and written at a time; where scoring is slower than sampling, sampling waits."""
NOT_SENT = (EXACT, "response_ids", "response_mask", "response_length", "length", "rollout_logprobs")
"""What roles have no use for: columns that only results need, and those that candidates get anew."""


class Sampling(Algorithm):
    """Batches of rows on their way through sampler, reward roles and files; several at a time.

    What is drawn is written before it is scored, and what is scored before its batch counts as done, so that a run can
    be killed at any moment and go on with `resume`. A candidate is scored as its text, the same whether it was just
    drawn or read from a file, and its seed follows from the run's, the row's uid and the repeat: neither batches nor
    replicas nor a kill change a result. Where sampler and reward roles share devices they take turns, batch by batch.

    The driver holds light columns, the texts of the batches in flight, and the keys of what is done.
    """

    Config: ClassVar[type[SamplingConfig]] = SamplingConfig
    config: SamplingConfig
    sampler: SamplerRole | None
    prm: PRMRole | None
    orm: ORMRole | None
    more_roles: ClassVar[Mapping[str, type[Role]]] = MappingProxyType({"orm_": ORMRole})
    can_resume: ClassVar[bool] = True

    def __init__(self, config: SamplingConfig, run: Run) -> None:
        super().__init__(config, run)
        self.scorers = run.scorers
        self.phases = {**self.phases, **self.scorers.phases}
        in_turn = run.config.deterministic or takes_turns(run.config)
        self.sampling = asyncio.Semaphore(1 if in_turn else AHEAD)
        self.room = asyncio.Semaphore(1 if in_turn else IN_FLIGHT)
        self.writing = asyncio.Lock()
        self.done = self.drawn = self.tokens = 0
        """Batches that are written; candidates that were drawn, and their tokens."""

    @classmethod
    def begin(cls, config: RunConfig, run_dir: Path) -> str | None:
        """Whether this folder may be written, and whether anything is left to do; see `sampling_folder`."""
        return sampling_folder.begin(config, run_dir)

    async def run(self) -> None:
        """Draw, score and write what is missing, a batch after the other, and then the results."""
        started, telemetry = time.monotonic(), self.job.telemetry
        self.results = await asyncio.to_thread(self.open)
        try:
            parts = list(self.results.parts(self.config.num_sampling_batch_size))
            telemetry.stage("sampling", len(parts))
            try:
                async with asyncio.TaskGroup() as batches:
                    for part in parts:
                        await self.room.acquire()
                        batches.create_task(self.follow(part))
            except BaseExceptionGroup as faults:
                raise faults.exceptions[0] from None
            await self.finish(time.monotonic() - started)
        finally:
            self.results.close()

    async def follow(self, part: Part) -> None:
        """One batch on its way: drawn, scored, written."""
        try:
            async with self.sampling:
                drawn = await self.draw(part)
            candidates, metrics = await self.score(part, drawn)
            async with self.writing:
                await asyncio.to_thread(self.results.add, part, candidates)
                self.done += 1
                self.job.telemetry.step(self.done, metrics)
        finally:
            self.room.release()

    async def draw(self, part: Part) -> list[Row]:
        """All candidates of the part that are not scored yet: those an earlier run drew, and what is missing."""
        drawn = list(self.results.samples.read(part.drawn))
        if not part.to_draw:
            return [{name: row.get(name) for name in SAMPLE} for row in drawn]
        assert self.sampler is not None
        places, repeats = zip(*((p, r) for p, r in zip(part.rows, part.draw, strict=True) if r), strict=True)
        rows = self.job.dataset.rows.take(places)
        # A sampler that reads messages, not tokens, reads them as the data set had them.
        rows = rows.drop([name for name in NOT_SENT if name != EXACT or "prompt_ids" in rows])
        if any(len(each) < self.config.num_return_sequences for each in repeats):
            rows = rows.with_columns({"repeats": [np.asarray(each, np.int32) for each in repeats]})
        # No step in the seed: which call a candidate is drawn by changes with every interruption.
        sampling = self.config.sampling(n=self.config.num_return_sequences, seed=self.job.config.seed, step=0)
        async with self.turn("sample"):
            samples = await self.sampler.sample(rows, sampling)
        fresh = await rows_of(samples, SAMPLE)
        refuse_others(fresh, rows["uid"].to_pylist(), repeats)
        async with self.writing:
            await asyncio.to_thread(self.results.samples.append, fresh)
        self.drawn += len(fresh)
        self.tokens += sum(row["response_length"] or 0 for row in fresh)
        return [{name: row.get(name) for name in SAMPLE} for row in drawn] + fresh

    async def score(self, part: Part, drawn: Sequence[Row]) -> tuple[list[Row], Metrics]:
        """The candidates with what every reward role says of them; those without a response are asked of none."""
        answered = [row for row in drawn if candidate_of(row, ()).answered]
        metrics: Metrics = {"rows": float(len(part.rows)), "candidates": float(len(drawn))}
        metrics["answered"] = float(len(answered))
        metrics["tokens"] = float(sum(row["response_length"] or 0 for row in drawn))
        if not self.scorers or not answered:
            return list(drawn), metrics
        place_of = {self.results.uid_of(place): place for place in part.rows}
        rows = self.job.dataset.rows.take([place_of[row["uid"]] for row in answered]).drop(NOT_SENT)
        own = ("repeat", "response_text", "finish_reason", "response_length")
        rows = rows.with_columns({name: [row[name] for row in answered] for name in own})
        scored = await self.scorers.score(self, rows, in_turn=self.job.config.deterministic)
        # A sum of scores that are not normalised yet would be taken for the one that candidates are ranked by.
        new = [name for name in scored.column_names if name not in rows and name != TOTAL]
        scores = {key_of(row): row for row in await rows_of(scored, ("uid", "repeat", *new))}
        refuse_others(list(scores.values()), [row["uid"] for row in answered], [(row["repeat"],) for row in answered])
        return [{**row, **scores.get(key_of(row), {})} for row in drawn], metrics | measure.of_rewards(scored)

    def open(self) -> Results:
        """The files of the run, with the rows of its part of the data; results of complete rows are written."""
        config, rows = self.config, self.job.dataset.rows
        folder = self.job.telemetry.run_dir
        places = data_part(len(rows), config.data_range or (0, 1))
        uids = rows["uid"].to_pylist()[places.start : places.stop]
        if not uids:
            raise DataError(
                f"algorithm.data_range={list(config.data_range or ())} is empty: the data has {len(rows)} rows in all"
            )
        sampling_folder.check_data(folder, rows.take(places).drop(NOT_PASSED_ON - {"uid"}))
        samples: Journal | None = None
        repeats: Mapping[str, Sequence[int]] | int = config.num_return_sequences
        if config.candidates is not None:
            samples, repeats = cached(Path(config.candidates), uids)
            if others := len(samples) - sum(map(len, repeats.values())):
                self.job.telemetry.event(
                    f"{others} of {len(samples)} candidates in {samples.path} are of rows that are not in this "
                    + ("data" if config.data_range is None else "part of the data")
                )
        results = Results(folder, rows, places, repeats, config.rules(self.job.config.roles), samples)
        for journal in (results.samples, results.candidates):
            if journal.torn:
                what = "is made again" if journal.path.parent == folder else "is passed over"
                self.job.telemetry.event(f"{journal.path.name}: the last line was cut short, and {what}")
        if len(results.candidates):
            self.job.telemetry.event(f"going on: {len(results.candidates)} candidates are done")
        results.begin()
        return results

    async def finish(self, seconds: float) -> None:
        """Write the results in the order of the data, and say what became of the rows."""
        results, telemetry = self.results, self.job.telemetry
        tally, notes = await asyncio.to_thread(results.finish)
        report = getattr(self.job.dataset, "report", None)
        summary = sampling_summary.as_plain(tally, report, drawn=self.drawn, tokens=self.tokens, seconds=seconds)
        write_json(results.folder / "summary.json", summary)
        for note in notes:
            telemetry.event(note)
        telemetry.tables(sampling_summary.tables_of(summary, self.config.output))
        what = f"{tally.kept} {'pairs' if self.config.output == 'pairs' else 'responses'}"
        telemetry.event(f"{what} in {results.path}")
        done: dict[str, Any] = {"rows": tally.rows, "results": what, "file": results.path.name}
        write_json(results.folder / "finished.json", done)


def takes_turns(config: RunConfig) -> bool:
    """Whether the sampler shares devices with a role that scores there; reward functions and services use none."""
    if "sampler" not in config.roles or takes_no_device(config, "sampler"):
        return False
    return bool(tenants_beside(config, "sampler"))


async def rows_of(batch: Batch, names: Sequence[str]) -> list[Row]:
    """These columns of a batch as rows; a column that is not there is null."""
    local = await batch.fetch([name for name in names if name in batch])
    return [{name: row.get(name) for name in names} for row in local.table.to_pylist()]


def key_of(row: Row) -> tuple[str, int]:
    """The uid and the repeat of a candidate."""
    return row["uid"], row["repeat"]


def refuse_others(rows: Sequence[Row], uids: Sequence[str], repeats: Sequence[Sequence[int]]) -> None:
    """Raises DataError where a role gave back other candidates than it was given."""
    asked = {(uid, repeat) for uid, each in zip(uids, repeats, strict=True) for repeat in each}
    given = [key_of(row) for row in rows]
    if len(given) != len(asked) or set(given) != asked:
        odd = next(iter([key for key in given if key not in asked] + sorted(asked - set(given))), given[:1])
        raise DataError(
            f"a role gave back {len(given)} candidates for {len(asked)}, and not the same ones (first: {odd}): a role "
            "returns a row a candidate, with its uid and repeat"
        )
