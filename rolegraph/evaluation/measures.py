"""From rewards to numbers about a set: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rolegraph.evaluation.config import Measure
from rolegraph.interfaces import Metrics
from rolegraph.losses.advantages import Floats

ROUNDING = 1e-9
"""Rewards are sums of floats: so much below the threshold passes as well."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k responses passes, of which c of n drawn did: 1 - C(n - c, k) / C(n, k).

    Unbiased (arXiv:2107.03374, equation 1). NaN where fewer than k were drawn.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if n < k:
        return float("nan")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def of_rewards(rewards: Floats, measures: Sequence[Measure], threshold: float) -> Metrics:
    """Each measure over the prompts, of rewards [prompts, n]; NaN is a response without a reward.

    Such a response is left out as if it had not been drawn, and a prompt with too few others, from that measure; a
    measure without prompts is NaN.
    """
    known = np.isfinite(rewards)
    passed = known & (np.nan_to_num(rewards, nan=-np.inf) >= threshold - ROUNDING)
    found: Metrics = {}
    for each in measures:
        if each.kind == "pass":
            pairs = zip(known.sum(axis=1).tolist(), passed.sum(axis=1).tolist(), strict=True)
            values = np.array([pass_at_k(n, c, each.k) for n, c in pairs])
        else:
            first = known[:, : each.k].sum(axis=1)
            values = np.where(first > 0, passed[:, : each.k].sum(axis=1) / np.maximum(first, 1), np.nan)
        values = values[np.isfinite(values)]
        found[str(each)] = float(values.mean()) if len(values) else float("nan")
    return found
