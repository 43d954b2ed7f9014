"""A policy-gradient loss that listens to failures less than to successes: one function, no role touched."""

from __future__ import annotations

import torch

from rolegraph.losses.types import LossOutput, Stat, TokenBatch


def tilted(tokens: TokenBatch, *, failure_weight: float = 0.5) -> LossOutput:
    """REINFORCE on the group advantage, with negative advantages scaled by `failure_weight`.

    Summed over response tokens and divided by the token count of the whole global batch, so that the result does not
    depend on how the rows were split over micro-batches and ranks.
    """
    advantage = tokens.per_token(tokens.columns["advantage"])
    tilt = torch.where(advantage < 0, failure_weight, 1.0) * advantage
    ratio = torch.exp(tokens.logprobs - tokens.logprobs.detach())
    loss = -(tilt * ratio * tokens.mask).sum() / tokens.totals.tokens.clamp(min=1)
    failures = Stat(((advantage < 0) * tokens.mask).sum(), tokens.mask.sum())
    return LossOutput(loss, {"failure_tokens": failures})
