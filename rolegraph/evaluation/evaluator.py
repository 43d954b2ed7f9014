"""One evaluation: the engines get the weights of now, and every set is answered, scored and measured."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow.compute as pc

from rolegraph.algorithms import metrics as measure
from rolegraph.algorithms.grpo import RESPONSE_COLUMNS
from rolegraph.algorithms.scorers import Scorers
from rolegraph.batch import Batch
from rolegraph.evaluation.config import EvalSetConfig
from rolegraph.evaluation.measures import ROUNDING, of_rewards
from rolegraph.interfaces import Metrics, ORMRole, RolloutRole, SamplingParams, TrainRole
from rolegraph.telemetry.samples import FINISH_S, SampleFiles
from rolegraph.turns import PHASES

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm

TEACHER_COLUMNS = ("teacher_prompt_ids", "teacher_prompt_length")


@dataclass(frozen=True)
class EvalSet:
    """A set with its rows and with who scores its answers."""

    name: str
    config: EvalSetConfig
    rows: Batch
    scorer: Scorers | ORMRole
    """The run's reward roles, or one of functions for this set, which takes no device."""
    completion_length: int = 0
    """Tokens that a response may have."""

    @property
    def sampling(self) -> SamplingParams:
        """How responses are drawn, by seeds that are the set's own."""
        config = self.config
        return SamplingParams(
            n=config.samples,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=self.completion_length,
            seed=seed_of(config.seed),
        )


def seed_of(seed: int) -> int:
    """The base of an eval set's seeds: none that a run is given, so that no training sample shares a draw.

    >>> seed_of(0) == seed_of(0) != seed_of(1), seed_of(0) > 2**61
    (True, True)
    """
    digest = hashlib.blake2b(f"eval {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1 << 61


class Evaluator:
    """Evaluates all sets of a run, one after another, and keeps their answers below `folder`.

    Nothing that training goes by changes: neither weight versions, nor seeds, nor the order of its data.
    """

    def __init__(self, sets: Sequence[EvalSet], folder: Path, *, use_ray: bool = False) -> None:
        self.sets = sets
        self._files = SampleFiles(folder, use_ray=use_ray)

    async def evaluate(self, algorithm: Algorithm, step: int) -> Metrics:
        """The metrics of all sets, by the trainer's weights of now; `step` names the files with the answers."""
        turns, found = _Turns(algorithm), Metrics()
        if algorithm.job.sync is not None and any(each.config.samples for each in self.sets):
            async with turns.turn("sync"):
                await algorithm.job.sync.refresh()
        for each in self.sets:
            metrics: Metrics = {}
            if each.config.loss:
                metrics["loss"] = await _loss(turns, algorithm.train, each.rows)  # type: ignore[attr-defined]
            if each.config.samples:
                answers = await _answers(turns, algorithm.rollout, each)  # type: ignore[attr-defined]
                metrics |= _of_answers(each, answers)
                self._files.save(_with_passed(each, answers), f"{each.name}/step-{step}.parquet")
            found |= {f"eval/{each.name}/{name}": value for name, value in metrics.items()}
        return found

    def faults(self, *, at_end: bool = False) -> list[str]:
        """Answers that could not be written since the last call; at the end, after a wait for those that still are."""
        return self._files.faults(FINISH_S if at_end else 0.0)


class _Turns:
    """Takes turns as the algorithm does, and times all of them as `eval`."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._job = algorithm.job
        self._phases = {**PHASES, **algorithm.phases, **algorithm.job.scorers.phases}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        phase, telemetry = self._phases[name], self._job.telemetry
        async with self._job.turns.take(name, phase, lambda roles: telemetry.phase("turns", *roles)):
            with telemetry.phase("eval", *phase.roles):
                yield

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Work that takes no device."""
        with self._job.telemetry.phase("eval"):
            yield


async def _answers(turns: _Turns, rollout: RolloutRole, each: EvalSet) -> Batch:
    prompts = each.rows.drop((*RESPONSE_COLUMNS, *TEACHER_COLUMNS))
    async with turns.turn("generate"):
        answers = await rollout.generate(prompts, each.sampling)
    if isinstance(each.scorer, Scorers):
        return await each.scorer.score(turns, answers)
    async with turns.beside():
        return await each.scorer.score(answers)


async def _loss(turns: _Turns, train: TrainRole, rows: Batch) -> float:
    """Nats a response token."""
    async with turns.turn("logprobs"):
        scored = await train.logprobs(rows)
    fetched = await scored.fetch(["logprobs"])
    total = pc.sum(pc.cast(fetched["logprobs"].flatten(), "float64")).as_py() or 0.0
    return -cast(float, total) / float(rows.numpy("response_length").sum())


def _of_answers(each: EvalSet, answers: Batch) -> Metrics:
    rewards = answers.numpy("reward").reshape(-1, each.config.samples)
    return {
        **of_rewards(rewards, each.config.measures, each.config.pass_threshold),
        **measure.of_rewards(answers),
        **measure.of_lengths(answers),
    }


def _with_passed(each: EvalSet, answers: Batch) -> Batch:
    """The rows with whether each passed."""
    reward = np.nan_to_num(answers.numpy("reward"), nan=-np.inf)
    return answers.with_columns({"passed": reward >= each.config.pass_threshold - ROUNDING})
