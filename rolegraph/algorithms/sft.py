"""Supervised training: on responses, on raw text, and as the warm start of other algorithms."""

from __future__ import annotations

from typing import ClassVar

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import PTConfig, SFTConfig, WarmStartConfig
from rolegraph.algorithms.metrics import of_step
from rolegraph.interfaces import LossSpec, RolloutRole, TrainRole

WARM_START = "warm_start"
CROSS_ENTROPY = LossSpec("rolegraph.losses.supervised.cross_entropy")


class SFT(Algorithm):
    """Cross-entropy on the dataset's responses; engines, where there are some, answer eval sets."""

    Config: ClassVar[type[SFTConfig]] = SFTConfig
    config: SFTConfig
    train: TrainRole
    rollout: RolloutRole | None
    can_save: ClassVar[bool] = True
    stage = "sft"

    async def run(self) -> None:
        """Take the steps of the run, or of one pass over the dataset."""
        rows = self.config.global_batch_size
        loss = self.config.loss or CROSS_ENTROPY
        await supervised(self, self.train, stage=self.stage, steps=self.steps(rows), rows=rows, loss=loss)


class PT(SFT):
    """Cross-entropy on raw text, every token of it."""

    Config: ClassVar[type[SFTConfig]] = PTConfig
    stage = "pt"


async def supervised(
    algorithm: Algorithm,
    train: TrainRole,
    *,
    stage: str,
    steps: int,
    rows: int,
    loss: LossSpec = CROSS_ENTROPY,
    lr: float | None = None,
    is_main: bool = True,
) -> None:
    """`steps` optimizer steps of `rows` dataset rows each, in the run's seeded order; `lr` overrides the schedule.

    Steps that were taken before a checkpoint are not taken again: where they ended in the data follows from how many.
    """
    run = algorithm.job
    await algorithm.begin_stage(stage, steps, is_main=is_main)
    batches = run.dataset.batches(rows, run.config.seed, start=rows * algorithm.at.number)
    while algorithm.at.number < steps:
        batch = next(batches)
        async with algorithm.turn("train"):
            metrics = await train.step(batch, loss=loss, lr=lr)
        await algorithm.end_step(of_step(metrics), batch)


async def warm_start(algorithm: Algorithm, train: TrainRole, options: WarmStartConfig, *, rows: int) -> None:
    """Supervised steps on the dataset's responses before the algorithm's own; `rows` a step unless they say another.

    Optimizer and schedule start anew after them, and what they taught is what reference weights hold. Nothing happens
    where the run goes on from a checkpoint behind them.
    """
    if algorithm.is_behind(WARM_START):
        return
    size = options.global_batch_size or rows
    steps = options.max_steps
    await supervised(algorithm, train, stage=WARM_START, steps=steps, rows=size, lr=options.lr, is_main=False)
    async with algorithm.turn("train"):
        await train.reset_optimizer()
        if algorithm.job.config.keeps_reference:
            await train.save_reference()
