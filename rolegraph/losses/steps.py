"""Rewards of single steps: process supervision of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rolegraph.losses.advantages import RESIDUE
from rolegraph.losses.config import StepScale
from rolegraph.losses.terms import STD_EPSILON, still_to_come
from rolegraph.losses.types import Reduce, Steps, TokenBatch


def step_advantages(tokens: TokenBatch, steps: Steps, group: Tensor, scale: StepScale, reduce: Reduce) -> Tensor:
    """[tokens] the sum of the normalised scores of the steps of the row that end at the token or later.

    `group` [rows] says which prompt a row answers. The statistics are over all steps of the group (or, for the scale
    `batch`, the deviation over those of the global batch); steps without a score are left out of everything.
    """
    values = normalised(steps.scores, group[steps.row], scale, reduce)
    at_end = torch.zeros(len(tokens.mask), dtype=torch.float64, device=tokens.mask.device)
    has_tokens = steps.last >= 0
    at_end = at_end.index_add(0, steps.last[has_tokens], values[has_tokens])
    # A step may end at a token that the policy did not produce (a tool's answer).
    unmasked = replace(tokens, mask=torch.ones_like(tokens.mask))
    return still_to_come(unmasked, at_end).to(tokens.logprobs.dtype)


def normalised(scores: Tensor, group: Tensor, scale: StepScale, reduce: Reduce) -> Tensor:
    """[steps] scores less the mean of their group, over a standard deviation; 0 where there is none.

    As `rolegraph.losses.advantages` does with rewards of rows: with Bessel's correction, and exactly zero in groups
    whose scores are equal.
    """
    there = torch.isfinite(scores)
    everybody = reduce.gather(scores[there])
    ids, at = torch.unique(reduce.gather(group[there].double()), return_inverse=True)
    if not len(ids):
        return torch.zeros_like(scores)
    count = torch.bincount(at, minlength=len(ids)).double()
    mean = torch.bincount(at, everybody, len(ids)) / count
    squares = torch.bincount(at, (everybody - mean[at]) ** 2, len(ids))
    low, high = (
        everybody.new_zeros(len(ids)).scatter_reduce(0, at, everybody, how, include_self=False)
        for how in ("amin", "amax")
    )
    spread = high - low > RESIDUE * torch.maximum(low.abs(), high.abs()).clamp(min=1)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    mine = torch.searchsorted(ids, group.double()).clamp(max=len(ids) - 1)
    values = torch.where(there & spread[mine], scores - mean[mine], 0.0)
    if scale == "group":
        return values / (deviation[mine] + STD_EPSILON)
    if scale == "batch":
        return values / ((everybody.std() if len(everybody) > 1 else everybody.new_zeros(())) + STD_EPSILON)
    return values
