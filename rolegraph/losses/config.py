"""The options of the policy loss and their defaults, light enough to compose a config with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
ImportanceLevel = Literal["token", "sequence", "sequence_token"]
StepScale = Literal["group", "batch", "none"]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What is compared (ratios and their level), how far it may move (clipping), and what the sum is divided by."""

    loss_type: LossType = "grpo"
    """grpo, sapo: mean over rows of each row's token mean. bnpo, dapo, cispo: mean over all tokens of the global batch
    (bnpo and dapo differ by name alone, since the global token count is the denominator of both). dr_grpo: sum over
    rows * max_completion_length. cispo weighs log-probabilities by the clipped, detached ratio; sapo gates the ratio
    softly; the others clip."""
    importance_sampling_level: ImportanceLevel = "token"
    """token: a ratio a token. sequence: the geometric mean over the row (GSPO). sequence_token: the row's value with
    the gradient of each token (GSPO-token)."""
    epsilon: Annotated[float, Ge(0)] = 0.2
    """Ratios may fall to 1 - epsilon."""
    epsilon_high: Annotated[float, Ge(0)] | None = None
    """Ratios may rise to 1 + epsilon_high; null: epsilon."""
    delta: Annotated[float, Gt(1)] | None = None
    """Upper bound of the ratio where the advantage is negative (two-sided clipping); null: none."""
    beta: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL to the reference weights (k3 estimator); above 0 the train role keeps reference weights."""
    teacher_kl_coef: Annotated[float, Ge(0)] = 0.0
    """Distil inside RL: each token's advantage gains this times (teacher logprob - old logprob), whose mean is the
    negative KL(old || teacher)."""
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of tokens, those of highest entropy in the global batch, that the policy gradient uses."""
    rollout_importance_correction: Literal["truncate", "mask"] | None = None
    """Weigh tokens by trainer probability / rollout probability: truncate caps the weight at the threshold, mask drops
    tokens above it; null: no correction, or truncate with algorithm.max_staleness above 0."""
    rollout_importance_threshold: Annotated[float, Gt(0)] | None = None
    """The cap of that weight; null: 2.0."""
    tau_pos: Annotated[float, Gt(0)] | None = None
    """sapo: steepness of the gate where the advantage is positive; null: 1.0."""
    tau_neg: Annotated[float, Gt(0)] | None = None
    """sapo: steepness of the gate where the advantage is negative or zero; null: 1.05."""

    def check_loss(self, key: str) -> Iterator[str]:
        """Options that contradict each other or would be ignored; `key` is where the options stand in the config."""
        clips = self.loss_type not in ("cispo", "sapo")
        upper = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and not clips:
            yield f"{key}.delta has no effect with loss_type={self.loss_type}: remove it"
        elif self.delta is not None and self.delta <= 1 + upper:
            yield f"{key}.delta={self.delta} must exceed 1 + epsilon_high = {1 + upper:g}, where clipping begins"
        if clips and self.epsilon >= 1:
            yield f"{key}.epsilon={self.epsilon} leaves the ratio no lower bound: choose a value below 1"
        if self.loss_type == "sapo":
            for name in ("epsilon", "epsilon_high"):
                if changed(self, name):
                    yield f"{key}.{name} has no effect with loss_type=sapo (its gate does not clip): remove it"
        else:
            for name in ("tau_pos", "tau_neg"):
                if changed(self, name):
                    yield f"{key}.{name} is for loss_type=sapo, and loss_type is {self.loss_type}: remove it"
        if self.rollout_importance_correction is None and self.rollout_importance_threshold is not None:
            yield (
                f"{key}.rollout_importance_threshold has no effect without a correction: "
                f"set {key}.rollout_importance_correction to truncate or mask"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(PolicyOptions):
    """The arguments of `rolegraph.losses.policy.PolicyLoss`."""

    max_completion_length: Annotated[int, Ge(1)] | None = None
    """dr_grpo: the constant length that stands for every row's own."""
    kl_returns: Literal["batch", "none"] | None = None
    """Make per-token advantages of the column `reward` less beta times the KL still to come (REINFORCE++), normalised
    over the tokens of the global batch, or as they are; null: take the column `advantage`, and add the KL to the
    loss."""
    step_scale: StepScale | None = None
    """Add to each token's advantage the scores of the steps (columns `step_scores`, `step_ends`) that end at it or
    later, less the mean over the steps of the group, divided by the standard deviation of the group's or of the global
    batch's, or by none; null: steps have no say. Needs the column `group`."""
    step_weight: float = 1.0
    """What these are multiplied by."""

    def check(self, run: object) -> Iterator[str]:
        """Options that contradict each other or would be ignored."""
        yield from self.check_loss("algorithm.loss")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            yield "algorithm.loss.max_completion_length is missing: loss_type=dr_grpo divides by it"
        if self.loss_type != "dr_grpo" and self.max_completion_length is not None:
            yield f"algorithm.loss.max_completion_length has no effect with loss_type={self.loss_type}: remove it"
        if self.kl_returns is not None and self.beta == 0:
            yield "algorithm.loss.kl_returns has no effect with beta=0: set algorithm.loss.beta above 0"
        if self.step_scale is not None and self.kl_returns is not None:
            yield "algorithm.loss.step_scale and kl_returns both make advantages of tokens: set one of them to null"
        if self.step_scale is None and changed(self, "step_weight"):
            yield "algorithm.loss.step_weight has no effect without step_scale: set it to group, batch or none"


def changed(config: object, name: str) -> bool:
    """Whether a field of a dataclass instance differs from its default."""
    defaults = {f.name: f.default for f in fields(config)}  # type: ignore[arg-type]
    return bool(getattr(config, name) != defaults[name])


def beta_near_end(key: str, beta: float) -> str | None:
    """A warning for a divergence's beta within 0.01 of 0 or 1, but not there: the loss is near 0, not near a KL.

    `rolegraph.losses.divergence` gives the formula and figures. `key` is where beta stands in the config.
    """
    if not (0.0 < beta <= 0.01 or 0.99 <= beta < 1.0):
        return None
    end, share, name = (0, beta, "forward KL") if beta < 0.5 else (1, 1.0 - beta, "reverse KL")
    return (
        f"{key}={beta:g} weighs the divergence down to about {share:.1g} of a KL: it tends to 0 at both ends. For the "
        f"{name} itself write {key}={end}"
    )
