"""Advantages of whole rows from their rewards: float64 arrays in, float64 arrays out.

A reward that is null, NaN or infinite is no reward: its row is left out of every statistic and is not trained on.
Standard deviations have Bessel's correction, and `EPSILON` is added to them, as in TRL and ms-swift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EPSILON = 1e-4
"""Added to standard deviations."""
RESIDUE = 1e-9
"""Rewards this close, relative to the larger of 1 and their size, are equal: sums of weighted rewards carry rounding
residue (0.1 + 0.2 is not 0.3), which a division by its own spread would blow up to a full advantage."""


@dataclass(frozen=True)
class Groups:
    """The statistics of the groups of a batch, over the rows that have a reward."""

    ids: Ints
    """[groups] as given, ascending."""
    of_row: Ints
    """[rows] index into the other arrays."""
    valid: Bools
    """[rows] whether the row has a reward."""
    count: Ints
    """[groups] rows with a reward."""
    mean: Floats
    """[groups], 0 where no row has a reward."""
    std: Floats
    """[groups], 0 where fewer than two rows have a reward."""
    spread: Bools
    """[groups] whether the rewards differ by more than rounding residue."""

    @property
    def empty(self) -> Ints:
        """Ids of the groups in which no row has a reward."""
        return self.ids[self.count == 0]

    @property
    def equal(self) -> Bools:
        """[groups] whether the group has rewards, all equal."""
        return (self.count > 0) & ~self.spread

    def rows_with_spread(self) -> Bools:
        """[rows] whether the row's group has spread."""
        return self.spread[self.of_row]


@dataclass(frozen=True)
class Advantages:
    """Advantages and what was left out on the way."""

    values: Floats
    """[rows], 0 where the row has no reward."""
    valid: Bools
    """[rows] whether the row has a reward, and so takes part in training."""
    groups: Groups


def compute(
    rewards: Floats,
    groups: Ints,
    *,
    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo",
    scale: Literal["group", "batch", "none"] = "group",
) -> Advantages:
    """Advantages of [rows] rewards whose prompts are named by [rows] `groups`, scaled by a standard deviation.

    Groups without spread get exactly zero from grpo and rloo; from reinforce_plus_plus, whose baseline is the batch,
    a batch without spread does.
    """
    stats = group_statistics(rewards, groups)
    filled = np.where(stats.valid, rewards, 0.0)
    if estimator == "reinforce_plus_plus":
        values = centred_in_batch(filled, stats)
    elif estimator == "rloo":
        values = leave_one_out(filled, stats)
    else:
        values = centred_in_group(filled, stats)
    if scale == "group":
        values = values / (stats.std[stats.of_row] + EPSILON)
    elif scale == "batch":
        values = values / (batch_std(filled, stats.valid) + EPSILON)
    return Advantages(np.where(stats.valid, values, 0.0), stats.valid, stats)


def centred_in_group(rewards: Floats, stats: Groups) -> Floats:
    """[rows] reward less the mean of its group (GRPO, arXiv:2402.03300; unscaled: Dr. GRPO, arXiv:2503.20783)."""
    return np.where(stats.rows_with_spread(), rewards - stats.mean[stats.of_row], 0.0)


def leave_one_out(rewards: Floats, stats: Groups) -> Floats:
    """[rows] reward less the mean of the others of its group (RLOO, arXiv:2402.14740).

    With n rewards in the group this is n / (n - 1) times the distance from the group's mean.
    """
    count = stats.count[stats.of_row]
    return centred_in_group(rewards, stats) * (count / np.maximum(count - 1, 1))


def centred_in_batch(rewards: Floats, stats: Groups) -> Floats:
    """[rows] reward less the mean of the batch (REINFORCE++, arXiv:2501.03262, without its KL term)."""
    if not has_spread(rewards[stats.valid]):
        return np.zeros_like(rewards)
    return rewards - rewards[stats.valid].mean()


def batch_std(rewards: Floats, valid: Bools) -> float:
    """Standard deviation of all rewards there are (as in arXiv:2508.08221), 0 for fewer than two."""
    return float(rewards[valid].std(ddof=1)) if valid.sum() > 1 else 0.0


def has_spread(rewards: Floats) -> bool:
    """Whether rewards differ by more than rounding residue."""
    if not len(rewards):
        return False
    return bool(np.ptp(rewards) > RESIDUE * max(1.0, float(np.abs(rewards).max())))


def group_statistics(rewards: Floats, groups: Ints) -> Groups:
    """Counts, means, standard deviations and spread of [rows] rewards by their [rows] group."""
    rewards = np.asarray(rewards, dtype=np.float64)
    ids, of_row = np.unique(np.asarray(groups, dtype=np.int64), return_inverse=True)
    valid = np.isfinite(rewards)
    row, size = of_row[valid], len(ids)
    present = rewards[valid]
    count = np.bincount(row, minlength=size)
    mean = np.bincount(row, present, size) / np.maximum(count, 1)
    squares = np.bincount(row, (present - mean[row]) ** 2, size)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, row, present)
    np.maximum.at(high, row, present)
    scale = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    with np.errstate(invalid="ignore"):
        spread = (count > 0) & (high - low > RESIDUE * scale)
    return Groups(ids, of_row, valid, count, mean, np.sqrt(squares / np.maximum(count - 1, 1)), spread)
