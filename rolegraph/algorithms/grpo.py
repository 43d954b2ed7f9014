"""GRPO and its kin: sample a prompt several times, compare the samples, and make the better ones likelier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.algorithms import metrics as measure
from rolegraph.algorithms.ahead import Generations
from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import GRPOConfig
from rolegraph.algorithms.hooks import Step
from rolegraph.algorithms.sft import WARM_START, warm_start
from rolegraph.batch import Batch
from rolegraph.checkpoints.state import State
from rolegraph.interfaces import Metrics, ORMRole, PRMRole, RolloutRole, TeacherRole, TrainRole
from rolegraph.losses import advantages
from rolegraph.role import Role

if TYPE_CHECKING:
    from rolegraph.run import Run

RESPONSE_COLUMNS = ("response_ids", "response_mask", "response_length", "length")
"""What dataset rows with a response bring, and samples get anew."""
MAX_RESAMPLE_TIMES = 3


class GRPO(Algorithm):
    """Generations of samples, each used for `steps_per_generation * num_iterations` optimizer steps.

    With `max_staleness` above 0 the next ones are drawn beside the steps. The ratio of a step is against the trainer's
    weights as they were when its generation was taken, and a correction weighs each token by what these make of it over
    what the engine drew it with (decoupled PPO, arXiv:2505.24298).

    A sample's reward is the weighted sum of what the reward roles say of it: `orm`, `prm`, and as many `orm_NAME` as a
    config adds.

    The driver sees ids, lengths, rewards and advantages; token columns stay in the object store. A generation counts
    its planned optimizer steps even where rows were dropped and a step is left out, so that a run always ends.
    """

    Config: ClassVar[type[GRPOConfig]] = GRPOConfig
    config: GRPOConfig
    train: TrainRole
    rollout: RolloutRole
    orm: ORMRole | None
    prm: PRMRole | None
    teacher: TeacherRole | None
    more_roles: ClassVar[Mapping[str, type[Role]]] = MappingProxyType({"teacher_": TeacherRole, "orm_": ORMRole})
    can_save: ClassVar[bool] = True

    def __init__(self, config: GRPOConfig, run: Run) -> None:
        super().__init__(config, run)
        self.loss = config.loss_spec()
        self.teachers, self.ask = run.teachers, run.teachers.asked(0, False, config.temperature)
        self.scorers = run.scorers
        self.phases = {**self.phases, **self.teachers.phases, **self.scorers.phases}
        self.prompts = run.dataset.batches(config.prompts_per_generation, run.config.seed)
        self.rounds = 0
        """Calls of `generate` so far, the `step` of their samples: no two samples of a run share a seed."""
        self.drawn = self.place()
        """Where the last generation that is whole has ended in the data."""
        self.samples: Batch | None = None
        """The generation that steps are taken on."""
        self.used = config.steps_per_batch
        """Steps that were taken on it: all, so that another one comes first."""
        self.generations: Generations | None = None
        self.earlier: State | None = None
        """Of the checkpoint that the run goes on from."""

    async def run(self) -> None:
        """Generate, score, compare, step; until the steps of the run are taken."""
        telemetry, config = self.job.telemetry, self.config
        if config.has_teacher:
            self.teachers.assigned(self.job.dataset.rows)  # each row has its teacher, before any step is taken
        if config.warm_start is not None:
            await warm_start(self, self.train, config.warm_start, rows=config.global_batch_size)
        if self.teachers.own is not None:
            async with self.turn("teach"):
                await self.teachers.introduce(self.train, self.ask, again=self.is_behind(WARM_START))
        steps = self.steps(config.prompts_per_generation / config.steps_per_batch)
        await self.begin_stage("grpo", steps)
        if config.staleness_note:
            telemetry.event(config.staleness_note)
        taken, whole = (math.ceil(count / config.steps_per_batch) for count in (self.at.number, steps))
        async with Generations.of(self, self.sample, whole - taken, self.earlier) as self.generations:
            self.earlier = None  # or the store would hold its rows to the end
            while self.at.number < steps:
                metrics: Metrics = {}
                if self.samples is None or self.used == config.steps_per_batch:
                    self.generations.synced(await self.sync())
                    samples, metrics = await self.generations.take()
                    self.samples, self.used = self.with_advantages(await self.score_tokens(samples)), 0
                    telemetry.samples(self.at.number + 1, self.samples)
                for batch in self.batches(self.samples)[self.used :]:
                    metrics |= await self.step(batch)
                    self.used += 1
                    await self.end_step(metrics, batch)
                    metrics = {}
                    if self.at.number == steps:
                        break

    def state(self) -> State:
        """Where the data are, and the generations that steps are still to be taken on; see `Algorithm.state`."""
        is_used_up = self.samples is None or self.used == self.config.steps_per_batch
        rows = {} if self.samples is None or is_used_up else {"samples": self.samples}
        state = State({"drawn": self.drawn, "used": self.used}, rows)
        return state if self.generations is None else state.beside(self.generations.state())

    def restore(self, at: Step, state: State) -> None:
        """Go on in the middle of a generation, or before the next one."""
        super().restore(at, state)
        self.drawn, self.used, self.earlier = dict(state.values["drawn"]), int(state.values["used"]), state
        self.prompts.restore(self.drawn["prompts"])
        self.rounds = int(self.drawn["rounds"])
        self.samples = state.rows.get("samples")

    def place(self) -> dict[str, Any]:
        """Where the next generation begins in the data."""
        return {"prompts": self.prompts.state(), "rounds": self.rounds}

    async def sample(self) -> tuple[Batch, Metrics]:
        """The samples of a generation whose rewards are there, and what was drawn for them.

        With `dynamic_sample`, groups without spread are replaced by those of further prompts, at most
        `max_resample_times` times (DAPO, arXiv:2503.14476); what is drawn beyond the generation is left out.
        """
        wanted, again = self.config.prompts_per_generation, 0
        if self.config.dynamic_sample:
            again = self.config.max_resample_times or MAX_RESAMPLE_TIMES
        drawn: list[Batch] = []
        useful: list[Batch] = []
        found = 0
        for _ in range(1 + again):
            samples = await self.draw(first_group=len(drawn) * wanted)
            groups = advantages.group_statistics(samples.numpy("reward"), samples.numpy("group"))
            self.report_empty(samples, groups)
            keep = groups.valid & (groups.rows_with_spread() if self.config.dynamic_sample else True)
            drawn.append(samples)
            useful.append(samples.filter(keep))
            found += len(np.unique(useful[-1].numpy("group")))
            if found >= wanted:
                break
        everything, kept = Batch.concat(drawn), first_groups(Batch.concat(useful), wanted)
        metrics = self.measure(everything, kept, len(drawn))
        if self.config.has_teacher and self.teachers.own is None:
            kept = await self.teachers.taught(self, kept, self.ask)
        self.drawn = self.place()
        return kept, metrics

    async def draw(self, first_group: int) -> Batch:
        """Responses to the next prompts, with their rewards; prompts are numbered from `first_group`."""
        config = self.config
        prompts = next(self.prompts).drop(RESPONSE_COLUMNS)
        numbers = np.arange(first_group, first_group + len(prompts), dtype=np.int32)
        sampling = config.sampling(n=config.num_generations, seed=self.job.config.seed, step=self.rounds)
        self.rounds += 1
        async with self.turn("generate"):
            samples = await self.rollout.generate(prompts.with_columns({"group": numbers}), sampling)
        return await self.scorers.score(self, samples)

    async def score_tokens(self, samples: Batch) -> Batch:
        """Add the trainer's logprobs where the loss compares with them, and the reference's.

        A generation that is used for one step needs none of its own: the loss then compares with the current ones.
        """
        config, train = self.config, self.train
        if not len(samples):
            return samples
        if config.has_teacher:
            samples = await self.teachers.taught(self, samples, self.ask)
        if config.needs_logprobs:
            async with self.turn("logprobs"):
                scores = await train.logprobs(samples, temperature=config.temperature, entropy=config.needs_entropy)
            samples = beside(samples, scores)
        if config.needs_reference:
            async with self.turn("ref_logprobs"):
                scores = await train.logprobs(samples, temperature=config.temperature, reference=True)
            samples = beside(samples, scores)
        return samples

    def with_advantages(self, samples: Batch) -> Batch:
        """Add the column `advantage`, and leave out cut-off responses where the config says so."""
        config = self.config
        reward = samples.numpy("reward")
        if config.kl_on_rows and len(samples):
            reward = reward - config.beta * samples.numpy("ref_kl")
        found = advantages.compute(
            reward, samples.numpy("group"), estimator=config.advantage_estimator, scale=config.scale
        )
        samples = samples.with_columns({"advantage": found.values})
        return samples.filter(~measure.truncated(samples)) if config.overlong_filter else samples

    def batches(self, samples: Batch) -> list[Batch]:
        """The optimizer batches of a generation, in the order in which steps are taken on them."""
        return optimizer_batches(samples, self.config.steps_per_generation, self.config.num_iterations)

    async def step(self, batch: Batch) -> Metrics:
        """One optimizer step; none where nothing is left to learn from."""
        if not len(batch):
            self.job.telemetry.event("step left out: no sample of it is left to train on")
            return {"step/left_out": 1.0}
        async with self.turn("train"):
            metrics = await self.train.step(batch, loss=self.loss, temperature=self.config.temperature)
            if self.teachers.own is not None:
                await self.teachers.own.follow()
        return measure.of_step(metrics)

    def measure(self, drawn: Batch, kept: Batch, rounds: int) -> Metrics:
        """The metrics of a generation, over everything that was drawn for it."""
        groups = advantages.group_statistics(drawn.numpy("reward"), drawn.numpy("group"))
        overlong = int(measure.truncated(kept).sum()) if self.config.overlong_filter else 0
        found = measure.of_samples(drawn, groups) if self.scorers else measure.of_lengths(drawn)
        found |= {"rows/drawn": float(len(drawn)), "rows/dropped": float(len(drawn) - len(kept) + overlong)}
        return found | ({"resample/rounds": rounds - 1.0} if self.config.dynamic_sample else {})

    def report_empty(self, samples: Batch, groups: advantages.Groups) -> None:
        """Name the prompts none of whose samples has a reward; they are dropped."""
        if len(groups.empty):
            first = [int(np.flatnonzero(samples.numpy("group") == group)[0]) for group in groups.empty]
            names = ", ".join(samples["uid"].take(first).to_pylist())
            self.job.telemetry.event(f"dropped, no sample has a reward: {names}")


def beside(samples: Batch, scores: Batch) -> Batch:
    """The columns of `scores` that `samples` lack, beside those it has."""
    return samples.merge(scores.select([name for name in scores.column_names if name not in samples]))


def first_groups(samples: Batch, count: int) -> Batch:
    """The rows of the first `count` groups."""
    groups = np.unique(samples.numpy("group"))
    return samples if len(groups) <= count else samples.filter(samples.numpy("group") < groups[count])


def optimizer_batches(samples: Batch, steps: int, iterations: int) -> list[Batch]:
    """Cut whole groups into `steps` batches, as equal as can be, and go over them `iterations` times."""
    group = samples.numpy("group")
    return [samples.filter(np.isin(group, ids)) for ids in np.array_split(np.unique(group), steps)] * iterations
