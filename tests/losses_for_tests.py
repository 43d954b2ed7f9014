"""Losses by import path, for tests of train roles."""

from __future__ import annotations

from rolegraph.losses.types import LossOutput, Stat, TokenBatch


def nll(tokens: TokenBatch) -> LossOutput:
    """Mean negative log-likelihood of the trained tokens of the global batch."""
    summed = -(tokens.logprobs * tokens.mask).sum()
    mask = tokens.mask.sum()
    stats = {"nll": Stat(summed.detach(), mask), "longest": Stat(tokens.per_row(tokens.mask).max())}
    return LossOutput(summed / tokens.totals.tokens.clamp(min=1), stats)
