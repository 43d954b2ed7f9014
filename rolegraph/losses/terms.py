"""The terms policy losses are made of, each a function of flat [tokens] tensors (row after row, no padding)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rolegraph.losses.config import ImportanceLevel
from rolegraph.losses.types import Reduce, TokenBatch

LOG_BOUND = 20.0
"""Differences of logprobs are cut at this size before exp: e^20 is far past every clip, and float32 ends at e^88."""
STD_EPSILON = 1e-4
"""Added to standard deviations, as in `rolegraph.losses.advantages`."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a difference of logprobs, finite whatever the difference."""
    return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp()


def importance_ratio(tokens: TokenBatch, old: Tensor, level: ImportanceLevel) -> Tensor:
    """[tokens] probability under the current weights over that under the old ones.

    token: each token's own (PPO, arXiv:1707.06347). sequence: the geometric mean over the row's masked tokens (GSPO,
    arXiv:2507.18071). sequence_token: the same value, with the gradient of the token alone (GSPO-token, there too).
    """
    log_ratio = tokens.logprobs - old
    if level == "token":
        return ratio_of(log_ratio)
    row_mean = tokens.per_row(log_ratio) / row_lengths(tokens).clamp(min=1)
    if level == "sequence":
        return ratio_of(tokens.per_token(row_mean))
    return ratio_of(tokens.per_token(row_mean.detach())) * torch.exp(tokens.logprobs - tokens.logprobs.detach())


def row_lengths(tokens: TokenBatch) -> Tensor:
    """[rows] masked tokens of each row."""
    return tokens.per_row(torch.ones_like(tokens.mask))


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """[tokens] -min(ratio * A, clip(ratio, low, high) * A), the clipped objective of PPO (arXiv:1707.06347).

    Different bounds on both sides are clip-higher (DAPO, arXiv:2503.14476). `delta` bounds the first ratio as well,
    which matters where A is negative (two-sided clipping, INTELLECT-2, arXiv:2505.07291).
    """
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantage, ratio.clamp(low, high) * advantage)


def cispo_surrogate(logprobs: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """[tokens] -sg(clip(ratio, low, high)) * A * logprob (CISPO, MiniMax-M1, arXiv:2506.13585).

    The weight is clipped and every token keeps its gradient. The paper lifts the lower bound: epsilon of 1 or more.
    """
    return -ratio.detach().clamp(low, high) * advantage * logprobs


def sapo_surrogate(ratio: Tensor, advantage: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """[tokens] -(4 / tau) * sigmoid(tau * (ratio - 1)) * A, with tau by the sign of A (SAPO, arXiv:2511.20347)."""
    tau = torch.where(advantage > 0, torch.full_like(ratio, tau_pos), tau_neg)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[tokens] r - 1 - log r with r = reference / current, an unbiased estimate of KL(current || reference).

    Never negative (Schulman, http://joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300).
    """
    difference = (ref_logprobs - logprobs).clamp(-LOG_BOUND, LOG_BOUND)
    return difference.exp() - 1 - difference


def rollout_weight(old: Tensor, rollout: Tensor, threshold: float, truncate: bool) -> Tensor:
    """[tokens] trainer probability over rollout probability; above the threshold capped (truncate), or zero.

    Corrects for engines that sample from slightly other probabilities than the trainer computes (truncated importance
    sampling, https://fengyao.notion.site/off-policy-rl).
    """
    weight = ratio_of(old - rollout)
    return weight.clamp(max=threshold) if truncate else torch.where(weight <= threshold, weight, 0.0)


def row_mean_weights(tokens: TokenBatch) -> Tensor:
    """[tokens] weights of the mean over rows of each row's token mean, rows counted over the global batch."""
    lengths = tokens.per_token(row_lengths(tokens).clamp(min=1))
    return tokens.mask / (lengths * tokens.totals.rows.clamp(min=1))


def token_mean_weights(tokens: TokenBatch) -> Tensor:
    """[tokens] weights of the mean over tokens, counted over the global batch."""
    return tokens.mask / tokens.totals.tokens.clamp(min=1)


def constant_length_weights(tokens: TokenBatch, length: int) -> Tensor:
    """[tokens] weights of the sum over rows * length: no bias to short rows (Dr. GRPO, arXiv:2503.20783)."""
    return tokens.mask / (tokens.totals.rows.clamp(min=1) * length)


def still_to_come(tokens: TokenBatch, values: Tensor) -> Tensor:
    """[tokens] float64 sums over the masked tokens of the row from this one to its last."""
    values = values.double() * tokens.mask
    row_sum = tokens.per_row(values)
    before_row = row_sum.cumsum(0) - row_sum
    return (row_sum + before_row)[tokens.row] - values.cumsum(0) + values


def kl_returns(tokens: TokenBatch, reward: Tensor, kl: Tensor, beta: float, scaled: bool, reduce: Reduce) -> Tensor:
    """[tokens] advantages of REINFORCE++ (arXiv:2501.03262): the row's reward less beta * the KL still to come.

    Less their mean, and with `scaled` over their standard deviation, of all masked tokens of the global batch.
    """
    returns = tokens.per_token(reward.double()) - beta * still_to_come(tokens, kl)
    mask = tokens.mask.double()
    count = reduce.sum(mask.sum())
    mean = reduce.sum((returns * mask).sum()) / count.clamp(min=1)
    centred = (returns - mean) * mask
    if scaled:
        variance = reduce.sum((centred**2).sum()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return centred.to(tokens.logprobs.dtype)


def highest_entropy(entropy: Tensor, mask: Tensor, share: float, reduce: Reduce) -> Tensor:
    """[tokens] 1 for the `share` of masked tokens with the highest entropy in the global batch.

    At least one, and ties with the last ("Beyond the 80/20 rule", arXiv:2506.01939).
    """
    entropies = reduce.gather(entropy[mask > 0])
    if not len(entropies):
        return torch.zeros_like(mask)
    # 0.07 * 100 is a little more than 7 in floating point
    kept = min(max(math.ceil(share * len(entropies) - 1e-9), 1), len(entropies))
    threshold = torch.topk(entropies, kept).values[-1]
    return ((entropy >= threshold) & (mask > 0)).to(mask.dtype)
