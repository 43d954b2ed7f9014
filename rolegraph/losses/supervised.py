"""The supervised loss."""

from __future__ import annotations

import torch

from rolegraph.losses.types import LossOutput, Stat, TokenBatch


def cross_entropy(tokens: TokenBatch) -> LossOutput:
    """The mean negative logprob (nats) over the masked tokens of the global batch; also a metric, `cross_entropy`."""
    negative = -torch.where(tokens.mask > 0, tokens.logprobs, 0.0)
    loss = negative.sum() / tokens.totals.tokens.clamp(min=1)
    return LossOutput(loss, {"cross_entropy": Stat(negative.detach().sum(), tokens.mask.sum())})
