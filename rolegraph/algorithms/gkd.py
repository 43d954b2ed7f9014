"""Distillation: the student learns the teacher's next-token distributions, on samples of its own or of the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rolegraph.algorithms import metrics as measure
from rolegraph.algorithms.ahead import Generations, made_before
from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import GKDConfig
from rolegraph.algorithms.grpo import RESPONSE_COLUMNS
from rolegraph.algorithms.hooks import Step
from rolegraph.algorithms.sft import WARM_START, warm_start
from rolegraph.algorithms.teachers import LARGE
from rolegraph.batch import Batch
from rolegraph.checkpoints.state import State
from rolegraph.interfaces import Metrics, ORMRole, RolloutRole, TeacherRole, TrainRole
from rolegraph.role import Role

if TYPE_CHECKING:
    from rolegraph.run import Run


class GKD(Algorithm):
    """Steps on batches that the teacher has scored: top-K logprobs, or hidden states for the whole vocabulary.

    Which steps are on the student's own samples is drawn from the run's seed. With `max_staleness` above 0 those are
    drawn, and scored by a teacher with weights of its own, beside training. Hidden states go from the teacher's actors
    to the trainer's; the driver holds references. Rewards, where a role gives them, are logged and teach nothing.
    """

    Config: ClassVar[type[GKDConfig]] = GKDConfig
    config: GKDConfig
    train: TrainRole
    rollout: RolloutRole | None
    teacher: TeacherRole
    orm: ORMRole | None
    more_roles: ClassVar[Mapping[str, type[Role]]] = MappingProxyType({"teacher_": TeacherRole})
    can_save: ClassVar[bool] = True

    def __init__(self, config: GKDConfig, run: Run) -> None:
        super().__init__(config, run)
        self.teachers = run.teachers
        self.phases = {**self.phases, **self.teachers.phases}
        topk = config.gkd_logits_topk
        self.ask = self.teachers.asked(topk or 0, topk is None, config.temperature)
        self.batches = run.dataset.batches(config.global_batch_size, run.config.seed)
        self.ahead: dict[int, Batch] = {}
        """Dataset rows of steps that were passed over on the way to a later one."""
        self.drawn = 0
        """Batches taken from the dataset."""
        self.own: list[int] = []
        """The steps on samples of the student's own that are not generated yet."""
        self.generations: Generations | None = None
        self.earlier: State | None = None
        """Of the checkpoint that the run goes on from."""

    async def run(self) -> None:
        """Draw or read, score, step; until the steps of the run are taken."""
        telemetry, config = self.job.telemetry, self.config
        if config.note:
            telemetry.event(config.note)
        self.teachers.assigned(self.job.dataset.rows)  # each row has its teacher, before any step is taken
        if config.warm_start is not None:
            await warm_start(self, self.train, config.warm_start, rows=config.global_batch_size)
        await self.introduce()
        steps = self.steps(config.global_batch_size)
        await self.begin_stage("gkd", steps)
        on_policy = self.split(self.at.number + 1, steps)
        async with Generations.of(self, self.sample, len(on_policy), self.earlier) as self.generations:
            self.earlier = None  # or the store would hold its rows to the end
            for step in range(self.at.number + 1, steps + 1):
                if step in on_policy:
                    self.generations.synced(await self.sync())
                    rows, metrics = await self.generations.take()
                else:
                    rows, metrics = self.rows_of(step), {}
                rows = await self.teachers.taught(self, rows, self.ask)
                telemetry.samples(step, rows.drop(LARGE))
                metrics |= await self.step(rows, on_policy=step in on_policy)
                rows = rows.drop(LARGE)  # or the store would hold hidden states of two steps
                await self.end_step(metrics | {"on_policy": float(step in on_policy)}, rows)
                del rows

    def split(self, first: int, last: int) -> frozenset[int]:
        """The steps from `first` to `last` that are on the student's own samples; what they need is drawn next.

        Where the run goes on from a checkpoint, that may have the samples of the first few of them.
        """
        seed, size = self.job.config.seed, self.config.global_batch_size
        own = [step for step in range(first, last + 1) if is_on_policy(self.config.lmbda, seed, step)]
        self.batches, self.drawn = self.job.dataset.batches(size, seed, start=size * (first - 1)), first - 1
        made = len(made_before(self.earlier))
        for step in own[:made]:
            self.rows_of(step)
        self.own = own[made:]
        return frozenset(own)

    def state(self) -> State:
        """The samples that were drawn for later steps: all else follows from how many were taken."""
        if self.generations is None:
            return State()
        state = self.generations.state()
        # Hidden states live as long as the run: the teacher is asked again for all it said of such rows.
        return State(state.values, {name: without_hidden(rows) for name, rows in state.rows.items()})

    def restore(self, at: Step, state: State) -> None:
        """Go on behind the step `at`."""
        super().restore(at, state)
        self.earlier = state

    async def sample(self) -> tuple[Batch, Metrics]:
        """The student's responses to the prompts of its next step, scored where the teacher does not change."""
        assert self.rollout is not None
        step = self.own.pop(0)
        prompts = self.rows_of(step).drop(RESPONSE_COLUMNS)
        sampling = self.config.sampling(n=1, seed=self.job.config.seed, step=step)
        async with self.turn("generate"):
            samples = await self.rollout.generate(prompts, sampling)
        metrics = measure.of_lengths(samples)
        if self.orm is not None:
            async with self.turn("score"):
                samples = await self.orm.score(samples)
            metrics |= measure.of_rewards(samples) | measure.of_privileged(samples)
        if self.teachers.own is None:
            samples = await self.teachers.taught(self, samples, self.ask)
        return samples, metrics

    def rows_of(self, step: int) -> Batch:
        """The dataset rows of a step, whatever order the steps are asked for in."""
        while self.drawn < step:
            self.drawn += 1
            self.ahead[self.drawn] = next(self.batches)
        return self.ahead.pop(step)

    async def introduce(self) -> None:
        """Make trainer and teacher known to each other."""
        async with self.turn("teacher_head" if self.teachers.own is None else "teach"):
            await self.teachers.introduce(self.train, self.ask, again=self.is_behind(WARM_START))

    async def step(self, rows: Batch, *, on_policy: bool) -> Metrics:
        """One optimizer step."""
        config = self.config
        loss = config.loss_spec(on_policy=on_policy, teacher_temperature=self.teachers.temperature)
        async with self.turn("train"):
            metrics = await self.train.step(rows, loss=loss, temperature=config.temperature)
            if self.teachers.own is not None:
                await self.teachers.own.follow()
        return measure.of_step(metrics)


def without_hidden(rows: Batch) -> Batch:
    """The rows as they were before a teacher gave hidden states for them."""
    return rows.drop(("teacher_hidden", "teacher_token_logprobs")) if "teacher_hidden" in rows else rows


def is_on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step is on the student's own samples: a draw that depends on nothing but the seed and the step."""
    return bool(np.random.default_rng([seed, step]).random() < lmbda)
