"""The policy-gradient loss of GRPO and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rolegraph.losses import terms
from rolegraph.losses.config import PolicyLossConfig
from rolegraph.losses.steps import step_advantages
from rolegraph.losses.types import LossOutput, Reduce, Stat, TokenBatch

KEPT = "policy_gradient_mask"
RETURNS = "token_advantage"
STEPS = "step_advantage"


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(PolicyLossConfig):
    """Advantage-weighted ratios of current to old probabilities, clipped; plus beta times the KL to the reference.

    Columns: `advantage` a row (or `reward` with `kl_returns`); `logprobs` of the weights that the ratio is against,
    where missing the current ones, which is exact when every sample is used for one step; `ref_logprobs` for the KL;
    `teacher_token_logprobs` for `teacher_kl_coef`;
    `rollout_logprobs` for the importance correction; `entropy` for `top_entropy_quantile`; `step_scores`, `step_ends`
    and `group` for `step_scale`. Every option keeps its
    meaning however rows are split over micro-batches and ranks.

    Subclasses change a term by overriding its method.
    """

    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type=dr_grpo divides by max_completion_length: give it to the loss")

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The micro-batch's share of the loss, and its metrics."""
        tokens = replace(tokens, logprobs=_where_masked(tokens.logprobs, tokens))
        old = self.old_logprobs(tokens)
        advantage = self.advantages(tokens)
        if self.teacher_kl_coef > 0:
            advantage = advantage + self.teacher_kl_coef * (column(tokens, "teacher_token_logprobs") - old)
        ratio = terms.importance_ratio(tokens, old, self.importance_sampling_level)
        per_token = self.surrogate(tokens.logprobs, ratio, advantage)
        stats = token_stats(tokens, old) | self.ratio_stats(tokens, ratio.detach(), advantage)
        if KEPT in tokens.columns:
            per_token = per_token * tokens.columns[KEPT]
        if self.rollout_importance_correction is not None:
            weight = self.rollout_weight(tokens, old)
            per_token = per_token * weight
            stats["importance_weight/mean"] = _mean(weight, tokens)
        if self.beta > 0 and self.kl_returns is None:
            per_token = per_token + self.beta * terms.k3(tokens.logprobs, column(tokens, "ref_logprobs"))
        return LossOutput((per_token * self.token_weights(tokens)).sum(), stats)

    def prepare(self, tokens: TokenBatch, reduce: Reduce) -> Mapping[str, Tensor]:
        """What needs the whole global batch: returns with the KL in them, and the tokens of highest entropy."""
        tokens = replace(tokens, logprobs=_where_masked(tokens.logprobs, tokens))
        columns: dict[str, Tensor] = {}
        if self.kl_returns is not None:
            kl = tokens.logprobs - column(tokens, "ref_logprobs")
            reward, scaled = column(tokens, "reward"), self.kl_returns == "batch"
            columns[RETURNS] = terms.kl_returns(tokens, reward, kl, self.beta, scaled, reduce)
        if self.top_entropy_quantile < 1:
            entropy = column(tokens, "entropy")
            columns[KEPT] = terms.highest_entropy(entropy, tokens.mask, self.top_entropy_quantile, reduce)
        if self.step_scale is not None:
            if tokens.steps is None:
                raise KeyError("step_scale needs the columns 'step_scores' and 'step_ends': let a prm score the rows")
            group = column(tokens, "group")
            columns[STEPS] = step_advantages(tokens, tokens.steps, group, self.step_scale, reduce)
        return columns

    def old_logprobs(self, tokens: TokenBatch) -> Tensor:
        """[tokens] logprobs the ratio is against."""
        return column(tokens, "logprobs") if "logprobs" in tokens.columns else tokens.logprobs.detach()

    def advantages(self, tokens: TokenBatch) -> Tensor:
        """[tokens] advantages."""
        if RETURNS in tokens.columns:
            return tokens.columns[RETURNS]
        of_row = tokens.per_token(column(tokens, "advantage")).to(tokens.logprobs.dtype)
        return of_row + self.step_weight * tokens.columns[STEPS] if STEPS in tokens.columns else of_row

    def surrogate(self, logprobs: Tensor, ratio: Tensor, advantage: Tensor) -> Tensor:
        """[tokens] losses before weights and KL."""
        if self.loss_type == "sapo":
            return terms.sapo_surrogate(ratio, advantage, self.tau_pos or 1.0, self.tau_neg or 1.05)
        low, high = self.bounds
        if self.loss_type == "cispo":
            return terms.cispo_surrogate(logprobs, ratio, advantage, low, high)
        return terms.clipped_surrogate(ratio, advantage, low, high, self.delta)

    def token_weights(self, tokens: TokenBatch) -> Tensor:
        """[tokens] what each token's loss counts in the sum; all of the global batch add up to 1, or less (dr_grpo)."""
        if self.loss_type == "dr_grpo" and self.max_completion_length is not None:
            return terms.constant_length_weights(tokens, self.max_completion_length)
        if self.loss_type in ("grpo", "sapo"):
            return terms.row_mean_weights(tokens)
        return terms.token_mean_weights(tokens)

    def rollout_weight(self, tokens: TokenBatch, old: Tensor) -> Tensor:
        """[tokens] correction for the difference between rollout and trainer probabilities."""
        threshold, truncate = self.rollout_importance_threshold or 2.0, self.rollout_importance_correction == "truncate"
        return terms.rollout_weight(old, column(tokens, "rollout_logprobs"), threshold, truncate)

    @property
    def bounds(self) -> tuple[float, float]:
        """Where the ratio is clipped."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def ratio_stats(self, tokens: TokenBatch, ratio: Tensor, advantage: Tensor) -> dict[str, Stat]:
        """The ratio, and the share of tokens whose gradient (cispo: weight) its bounds take away."""
        stats = {"ratio/mean": _mean(ratio, tokens), "ratio/max": _max(ratio, tokens)}
        if self.loss_type == "sapo":
            return stats
        low, high = self.bounds
        below, above = ratio < low, ratio > high
        if self.loss_type != "cispo":
            below, above = below & (advantage < 0), above & (advantage > 0)
        stats |= {"clip/low": _mean(below, tokens), "clip/high": _mean(above, tokens)}
        if self.delta is not None:
            stats["clip/delta"] = _mean((ratio > self.delta) & (advantage < 0), tokens)
        return stats


def token_stats(tokens: TokenBatch, old: Tensor) -> dict[str, Stat]:
    """Entropy, the KLs to reference and teacher, and how far the rollout's logprobs are from the trainer's, in nats.

    The KL to the teacher is KL(old || teacher), estimated by the difference of the logprobs of what was drawn.
    """
    stats = {}
    if tokens.entropy is not None:
        stats["entropy"] = _mean(_where_masked(tokens.entropy, tokens), tokens)
    if "ref_logprobs" in tokens.columns:
        stats["kl"] = _mean(terms.k3(tokens.logprobs.detach(), column(tokens, "ref_logprobs")), tokens)
    if "teacher_token_logprobs" in tokens.columns:
        stats["teacher/kl"] = _mean(old - column(tokens, "teacher_token_logprobs"), tokens)
    if "rollout_logprobs" in tokens.columns:
        difference = (old - column(tokens, "rollout_logprobs")).abs()
        stats["rollout_logprob_difference/mean"] = _mean(difference, tokens)
        stats["rollout_logprob_difference/max"] = _max(difference, tokens)
    return stats


def column(tokens: TokenBatch, name: str) -> Tensor:
    """A column the loss needs; of a per-token one, what the policy did not produce reads 0, whatever stands there."""
    try:
        values = tokens.columns[name]
    except KeyError:
        there = ", ".join(sorted(tokens.columns)) or "none"
        raise KeyError(f"the loss needs the column {name!r}, and the batch has {there}") from None
    per_token = name not in ("advantage", "reward", "group")
    return _where_masked(values, tokens) if per_token else values


def _where_masked(values: Tensor, tokens: TokenBatch) -> Tensor:
    # a product with the mask would keep NaN, and the gradient of -inf
    return torch.where(tokens.mask > 0, values, 0.0)


def _mean(values: Tensor, tokens: TokenBatch) -> Stat:
    return Stat((values * tokens.mask).sum(), tokens.mask.sum())


def _max(values: Tensor, tokens: TokenBatch) -> Stat:
    masked = values * tokens.mask
    return Stat(masked.max() if len(masked) else masked.sum())
