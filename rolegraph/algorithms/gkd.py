"""Distillation: the student learns the teacher's next-token distributions, on samples of its own or of the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rolegraph.algorithms import metrics as measure
from rolegraph.algorithms.ahead import Generations
from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import GKDConfig
from rolegraph.algorithms.grpo import RESPONSE_COLUMNS
from rolegraph.algorithms.sft import warm_start
from rolegraph.algorithms.teachers import LARGE
from rolegraph.batch import Batch
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
        seed = self.job.config.seed
        self.own = [step for step in range(1, steps + 1) if is_on_policy(config.lmbda, seed, step)]
        on_policy = frozenset(self.own)
        async with Generations.of(self, self.sample, len(self.own)) as generations:
            for step in range(1, steps + 1):
                if step in on_policy:
                    generations.synced(await self.sync())
                    rows, metrics = await generations.take()
                else:
                    rows, metrics = self.rows_of(step), {}
                rows = await self.teachers.taught(self, rows, self.ask)
                telemetry.samples(step, rows.drop(LARGE))
                metrics |= await self.step(rows, on_policy=step in on_policy)
                rows = rows.drop(LARGE)  # or the store would hold hidden states of two steps
                await self.end_step(metrics | {"on_policy": float(step in on_policy)}, rows)
                del rows

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
            await self.teachers.introduce(self.train, self.ask)

    async def step(self, rows: Batch, *, on_policy: bool) -> Metrics:
        """One optimizer step."""
        config = self.config
        loss = config.loss_spec(on_policy=on_policy, teacher_temperature=self.teachers.temperature)
        async with self.turn("train"):
            metrics = await self.train.step(rows, loss=loss, temperature=config.temperature)
            if self.teachers.own is not None:
                await self.teachers.own.follow()
        return measure.of_step(metrics)


def is_on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step is on the student's own samples: a draw that depends on nothing but the seed and the step."""
    return bool(np.random.default_rng([seed, step]).random() < lmbda)
