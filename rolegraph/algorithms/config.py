"""What `algorithm:` in a config may say. Light imports only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from rolegraph.algorithms.distillation import GKDConfig, SelfTeacherConfig
from rolegraph.algorithms.options import Needs, OverlapOptions, SamplingOptions, ScoreOptions, WarmStartConfig
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.interfaces import LossSpec, StepReduce
from rolegraph.losses.config import PolicyLossConfig, PolicyOptions, changed
from rolegraph.role import is_scorer, is_teacher

__all__ = [
    "EvaluationConfig",
    "GKDConfig",
    "GRPOConfig",
    "Needs",
    "PTConfig",
    "SFTConfig",
    "SamplingConfig",
    "SelfTeacherConfig",
    "WarmStartConfig",
]

Estimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
Scale = Literal["group", "batch", "none"]

POLICY_LOSS = "rolegraph.losses.policy.PolicyLoss"
CORRECTION = "rollout_importance_correction"

DEFAULT_SCALE: dict[Estimator, Scale] = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
"""How each estimator scales its advantages when `scale_rewards` is null, as in the paper it comes from."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Cross-entropy on the dataset's responses, as the mean over the response tokens of a global batch."""

    draws_samples: ClassVar[bool] = False
    """Whether training asks for a rollout."""

    global_batch_size: Annotated[int, Ge(1)] = 32
    """Rows an optimizer step."""
    loss: LossSpec | None = None
    """The loss; null: `rolegraph.losses.supervised.cross_entropy`."""

    @property
    def needs_reference(self) -> bool:
        """Whether the train role keeps reference weights."""
        return False

    @property
    def data_needs(self) -> Needs:
        """What every dataset row must have."""
        return "response"

    def check(self, run: object) -> Iterator[str]:
        """Rules across fields; none here."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class PTConfig(SFTConfig):
    """Cross-entropy on raw text, every token of it."""

    @property
    def data_needs(self) -> Needs:
        """What every dataset row must have."""
        return "text"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ScoreOptions):
    """Eval sets, and nothing that is trained."""

    only_evaluates: ClassVar[bool] = True
    draws_samples: ClassVar[bool] = False
    reads_data: ClassVar[bool] = False
    """Whether the run's own `data` is read: here eval sets take over keys of it."""
    data_needs: ClassVar[Needs] = "prompt"
    needs_reference: ClassVar[bool] = False

    model: str | None = None
    """What results.json calls what was evaluated; null: the run's model."""
    prm_reward: StepReduce | Literal["per_step"] | None = None
    """What the scores of a response's steps amount to, as for grpo; null: min. per_step: no part of its reward."""

    def check(self, run: object) -> Iterator[str]:
        """What is said of reward roles that are not there."""
        if (roles := getattr(run, "roles", None)) is not None:
            yield from self.check_weights(roles)
            if self.prm_reward is not None and "prm" not in roles:
                yield f"algorithm.prm_reward={self.prm_reward} has no effect without a prm: remove it"


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyOptions, SamplingOptions, OverlapOptions, ScoreOptions):
    """Group-relative policy optimisation: samples a prompt, rewards, advantages, policy-gradient steps.

    One generation draws `steps_per_generation * global_batch_size` samples; they are cut into `steps_per_generation`
    optimizer steps of whole groups, gone over `num_iterations` times.
    """

    global_batch_size: Annotated[int, Ge(1)] = 64
    """Samples an optimizer step."""
    num_generations: Annotated[int, Ge(1)] = 8
    """Samples a prompt: the group."""
    steps_per_generation: Annotated[int, Ge(1)] = 1
    """Optimizer steps the samples of one generation are cut into."""
    num_iterations: Annotated[int, Ge(1)] = 1
    """Times each generation is gone over."""

    advantage_estimator: Estimator = "grpo"
    scale_rewards: Scale | None = None
    """Divide advantages by the reward's standard deviation in the group or the generation batch, or not at all. Null:
    group for grpo, none for rloo, batch for reinforce_plus_plus."""
    kl_in_reward: bool = False
    """Take beta times the KL off the reward instead of adding it to the loss: off the row's reward for grpo and rloo,
    token by token as a return for reinforce_plus_plus."""
    overlong_filter: bool = False
    """Leave samples cut off at `max_completion_length` out of the loss; they count in their group's statistics."""
    dynamic_sample: bool = False
    """Replace groups whose rewards are all equal by sampling further prompts (DAPO)."""
    max_resample_times: Annotated[int, Ge(1)] | None = None
    """Further sampling rounds a generation with dynamic_sample; null: 3. After them it trains on what there is."""

    prm_reward: StepReduce | Literal["per_step"] | None = None
    """What the scores of a response's steps amount to. min, mean, last: one number, a part of the sample's reward;
    null: min. per_step: each step's score is a reward of its own, normalised over all steps of the group; a token's
    advantage is that of its row plus the rewards of the steps that end at it or later (arXiv:2402.03300, section
    4.1.3), times score_weights.prm. Samples that are left out of a step (overlong_filter) have no part in that."""

    loss: LossSpec | None = None
    """The loss, a class or a function by `_target_`; null: `rolegraph.losses.policy.PolicyLoss` with the options above.
    With a loss of its own, these stay at their defaults, and what it needs is given in its node."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before RL; null: none."""

    @property
    def prompts_per_generation(self) -> int:
        """Prompts sampled at a time."""
        return self.steps_per_generation * self.global_batch_size // self.num_generations

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps a generation is used for."""
        return self.steps_per_generation * self.num_iterations

    @property
    def scale(self) -> Scale:
        """`scale_rewards`, with null filled in."""
        return self.scale_rewards or DEFAULT_SCALE[self.advantage_estimator]

    @property
    def needs_reference(self) -> bool:
        """Whether the train role keeps reference weights: a loss of its own asks by an argument `beta` above 0."""
        return self.reference_beta > 0

    @property
    def reference_beta(self) -> float:
        """The weight of the reference KL, wherever it is given."""
        return float(self.loss.kwargs.get("beta") or 0.0) if self.loss else self.beta

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss chooses tokens by the entropy they had before the steps of a generation."""
        return float(self.loss_spec().kwargs.get("top_entropy_quantile") or 1.0) < 1

    @property
    def needs_logprobs(self) -> bool:
        """Whether logprobs have to be kept from before the steps of a generation."""
        kl_in_reward = self.kl_in_reward or self.loss_spec().kwargs.get("kl_returns") is not None
        return self.steps_per_batch > 1 or kl_in_reward or self.needs_entropy

    @property
    def data_needs(self) -> Needs:
        """What every dataset row must have: a warm start learns from responses."""
        return "prompt" if self.warm_start is None else "response"

    @property
    def kl_on_rows(self) -> bool:
        """Whether the driver takes the KL off the rewards, a number a row."""
        return self.kl_in_reward and self.advantage_estimator != "reinforce_plus_plus"

    @property
    def corrects_by_default(self) -> bool:
        """Whether stale samples make the policy loss correct by the rollout's logprobs though nobody says how."""
        given = self.loss.kwargs.get(CORRECTION) if self.loss else self.rollout_importance_correction
        is_policy_loss = self.loss is None or self.loss.target == POLICY_LOSS
        return self.max_staleness > 0 and is_policy_loss and given is None

    @property
    def staleness_note(self) -> str:
        """What a person should know about the loss of stale samples; empty where there is nothing to say."""
        if self.corrects_by_default:
            return (
                f"max_staleness={self.max_staleness}: the loss weighs each token by trainer / rollout probability "
                f"({CORRECTION}=truncate)"
            )
        if self.max_staleness and self.loss and self.loss.target != POLICY_LOSS:
            return (
                f"max_staleness={self.max_staleness}: {self.loss.target} has to correct for stale samples itself, by "
                "the column rollout_logprobs"
            )
        return ""

    def loss_spec(self) -> LossSpec:
        """The loss of every optimizer step."""
        chosen = self.loss or self._policy_loss()
        if self.corrects_by_default:
            chosen = replace(chosen, kwargs={**chosen.kwargs, CORRECTION: "truncate"})
        return chosen

    def _policy_loss(self) -> LossSpec:
        options = {f.name: getattr(self, f.name) for f in fields(PolicyOptions) if changed(self, f.name)}
        if self.kl_on_rows:
            options.pop("beta")
        elif self.kl_in_reward:
            options["kl_returns"] = self.scale
        if self.loss_type == "dr_grpo":
            options["max_completion_length"] = self.max_completion_length
        if self.prm_reward == "per_step":
            options["step_scale"] = self.scale
            if (weight := self.score_weights.get("prm", 1.0)) != 1:
                options["step_weight"] = weight
        return LossSpec(POLICY_LOSS, options)

    def check(self, run: object) -> Iterator[str]:
        """What is wrong with these settings taken together, one sentence each."""
        yield from self._check_batch()
        yield from self._check_estimator()
        yield from self.check_overlap()
        if (roles := getattr(run, "roles", None)) is not None:
            yield from self._check_teacher(roles)
            yield from self._check_rewards(roles)
        corrected = replace(self, rollout_importance_correction="truncate") if self.corrects_by_default else self
        yield from corrected.check_loss("algorithm")
        if self.max_resample_times is not None and not self.dynamic_sample:
            yield "algorithm.max_resample_times has no effect without dynamic_sample: set algorithm.dynamic_sample=true"
        if self.kl_in_reward and self.beta == 0:
            yield "algorithm.kl_in_reward=true has no effect with beta=0: set algorithm.beta above 0"
        if self.loss is not None:
            if self.loss.target == POLICY_LOSS:
                yield from PolicyLossConfig(**self.loss_spec().kwargs).check(run)
            for name in [f.name for f in fields(PolicyOptions)] + ["kl_in_reward"]:
                if changed(self, name):
                    yield (
                        f"algorithm.{name} belongs to the default loss, and algorithm.loss is {self.loss.target}: "
                        f"give it as algorithm.loss.{name} if that takes it, or remove it"
                    )

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores the samples: a loss of its own asks by an argument `teacher_kl_coef` above 0."""
        given = self.loss.kwargs.get("teacher_kl_coef") if self.loss else self.teacher_kl_coef
        return float(given or 0.0) > 0

    def _check_teacher(self, roles: Mapping[str, Any]) -> Iterator[str]:
        """A teacher and its coefficient come together."""
        teachers = [role for role in roles if is_teacher(role)]
        if self.has_teacher and not teachers:
            yield "algorithm.teacher_kl_coef needs a teacher: choose one with teacher=NAME (or self), or set it to 0"
        if teachers and not self.has_teacher:
            yield f"{teachers[0]} is idle with algorithm.teacher_kl_coef=0: set it above 0, or {teachers[0]}=null"
        if self.has_teacher and self.temperature != 1:
            for role in teachers:
                if not getattr(roles[role].config, "temperatures", False):
                    yield (
                        f"algorithm.teacher_kl_coef at temperature={self.temperature:g} needs teacher logprobs at that "
                        f"temperature, and those of {role}={roles[role].name} are always of temperature 1: set "
                        f"algorithm.temperature=1, or {role}=megatron or huggingface"
                    )

    def _check_rewards(self, roles: Mapping[str, Any]) -> Iterator[str]:
        """Rewards may stay away only with a teacher, and each role that gives some has a say."""
        yield from self.check_weights(roles)
        scorers, per_step = [role for role in roles if is_scorer(role)], self.prm_reward == "per_step"
        for role in scorers:
            if self.score_weights.get(role) == 0:
                yield f"{role} is idle with algorithm.score_weights.{role}=0: give it another weight, or {role}=null"
        if not scorers and not self.has_teacher:
            yield "nothing to learn from without rewards: choose orm=functions, or a teacher and teacher_kl_coef"
        if self.dynamic_sample and not [role for role in scorers if not (per_step and role == "prm")]:
            without = "no role rewards whole responses" if scorers else "orm=null"
            yield f"algorithm.dynamic_sample=true looks at rewards, and {without}: set it to false, or orm=functions"
        if self.prm_reward is not None and "prm" not in roles:
            yield f"algorithm.prm_reward={self.prm_reward} has no effect without a prm: choose one with prm=NAME"
        step_scale = self.loss.kwargs.get("step_scale") if self.loss else None
        if per_step and self.loss is not None and self.loss.target == POLICY_LOSS and step_scale is None:
            yield (
                "algorithm.prm_reward=per_step belongs to the default loss, and algorithm.loss is given: set "
                "algorithm.loss.step_scale=group as well, or remove algorithm.loss"
            )
        if per_step and self.loss is not None and self.score_weights.get("prm"):
            takes = "" if self.loss.target == POLICY_LOSS else " if that takes it"
            yield (
                f"algorithm.score_weights.prm has no effect with prm_reward=per_step and algorithm.loss="
                f"{self.loss.target}, which weighs steps itself: give it as algorithm.loss.step_weight{takes}, or "
                "remove it"
            )
        if step_scale is not None and not per_step:
            yield "algorithm.loss.step_scale rewards single steps: set algorithm.prm_reward=per_step as well"

    def _check_batch(self) -> Iterator[str]:
        size, group = self.global_batch_size, self.num_generations
        if rest := size % group:
            fits = [str(value) for value in (size - rest, size - rest + group) if value]
            divisors = [g for g in range(2, size + 1) if size % g == 0]
            near = sorted(sorted(divisors, key=lambda g: (abs(g - group), g))[:2])
            yield (
                f"algorithm.global_batch_size={size} samples a step are no whole number of groups of "
                f"num_generations={group} ({size} / {group} = {size / group:.2f}): "
                f"set global_batch_size={' or '.join(fits)}"
                + (f", or num_generations={' or '.join(map(str, near))}" if near else "")
            )

    def _check_estimator(self) -> Iterator[str]:
        estimator = self.advantage_estimator
        if self.num_generations < 2 and estimator != "reinforce_plus_plus" and not self.has_teacher:
            yield (
                f"algorithm.num_generations=1: {estimator} compares the samples of one prompt and needs at least 2 "
                "(or advantage_estimator=reinforce_plus_plus, or a teacher with teacher_kl_coef)"
            )
        if self.prm_reward == "per_step" and estimator != "grpo":
            yield (
                f"algorithm.prm_reward=per_step compares each step with those of its group, and "
                f"advantage_estimator={estimator} has another baseline: set advantage_estimator=grpo, or prm_reward to "
                "min, mean or last"
            )
        if self.num_generations < 2 and self.dynamic_sample:
            yield "algorithm.dynamic_sample=true drops every group of num_generations=1 (no spread): set at least 2"
        if estimator == "reinforce_plus_plus" and self.scale_rewards == "group":
            yield (
                "algorithm.scale_rewards=group: reinforce_plus_plus normalises over the whole batch; "
                "use batch, none or null"
            )
