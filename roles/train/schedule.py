"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    lr: float,
    schedule: Schedule = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_lr: float = 0.0,
) -> float:
    """The rate of optimizer step `step`, counted from 0.

    During warm-up it is `lr * (step + 1) / (warmup_steps + 1)`: the first step learns already, and the first step after
    warm-up has the full `lr`. `linear` and `cosine` then fall to `min_lr`, reached at step `decay_steps` (counted from
    0, warm-up included) and kept afterwards. `constant` stays at `lr`.

    Raises ValueError for a schedule without a name here, or one that decays without `decay_steps`.

    >>> [round(learning_rate(step, lr=1.0, schedule="linear", warmup_steps=1, decay_steps=5), 2) for step in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"train.lr_schedule is {schedule!r}; choose constant, linear or cosine")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return lr
    if decay_steps is None:
        raise ValueError(f"train.lr_schedule={schedule} needs train.decay_steps, the step at which min_lr is reached")
    if step >= decay_steps:
        return min_lr
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + (lr - min_lr) * share
