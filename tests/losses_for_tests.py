"""Losses by import path, for tests of train roles."""

from __future__ import annotations

import torch
from torch import Tensor

from rolegraph.losses.types import LossOutput, Reduce, Stat, TokenBatch


def nll(tokens: TokenBatch) -> LossOutput:
    """Mean negative log-likelihood of the trained tokens of the global batch."""
    summed = -(tokens.logprobs * tokens.mask).sum()
    mask = tokens.mask.sum()
    stats = {"nll": Stat(summed.detach(), mask), "longest": Stat(tokens.per_row(tokens.mask).max())}
    return LossOutput(summed / tokens.totals.tokens.clamp(min=1), stats)


class Prepared:
    """Weighs each token by a column that `prepare` computes from the whole global batch."""

    needs_entropy = True

    def prepare(self, tokens: TokenBatch, reduce: Reduce) -> dict[str, Tensor]:
        """`weight` a token and `share` a row, both of the global batch."""
        rows = reduce.sum(torch.tensor([float(tokens.rows)]))
        order = reduce.gather(tokens.logprobs)
        return {
            "weight": tokens.logprobs / order.sum(),
            "share": torch.full((tokens.rows,), 1.0) / rows,
        }

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The weighted negative log-likelihood."""
        assert tokens.entropy is not None
        assert tokens.columns["share"].shape == (tokens.rows,)
        weight = tokens.columns["weight"] * tokens.mask
        one = torch.ones(())
        stats = {
            "weights": Stat(tokens.columns["weight"].sum(), one / tokens.rows),
            "shares": Stat(tokens.columns["share"].sum(), one / tokens.rows),
        }
        return LossOutput(-(weight * tokens.logprobs).sum(), stats)


def broken(tokens: TokenBatch) -> LossOutput:
    """A loss that is no number."""
    return LossOutput(tokens.logprobs.sum() * float("nan"))


def boundless(tokens: TokenBatch) -> LossOutput:
    """A loss that is infinite, with a gradient that is not."""
    return LossOutput(tokens.logprobs.sum() + float("inf"))


def constant(tokens: TokenBatch) -> LossOutput:
    """A loss without a gradient."""
    return LossOutput(torch.zeros(()))
