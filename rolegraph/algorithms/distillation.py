"""What `algorithm:` may say for distillation. Light imports only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt

from rolegraph.algorithms.options import Needs, OverlapOptions, SamplingOptions, WarmStartConfig
from rolegraph.interfaces import LossSpec, PolicyWeights
from rolegraph.losses.config import beta_near_end
from rolegraph.role import is_teacher

DISTILL_LOSS = "rolegraph.losses.distill.DistillLoss"
TEACHER_KEY = "teacher_key"
"""The column that says which teacher a row has: the role `teacher_` and its value, or `teacher` where it is null."""


class RunLike(Protocol):
    """What the rules need of a run's config."""

    @property
    def roles(self) -> Mapping[str, Any]:
        """The roles of the run by name, each with its `config` and `name`."""


@dataclass(frozen=True, kw_only=True)
class SelfTeacherConfig:
    """The policy as its own teacher: it takes no devices beside the trainer's, and no second model."""

    binds: ClassVar[str] = "train"
    """The role whose actors do the work: no group of this one is started."""
    temperatures: ClassVar[bool] = True
    gives_hidden: ClassVar[bool] = True

    weights: PolicyWeights = "initial"
    """current: those of now. initial: those of the start (after a warm start). average: a moving average."""
    decay: Annotated[float, Gt(0), Lt(1)] = 0.99
    """average: what is kept of it at each optimizer step."""

    @property
    def keeps_reference(self) -> bool:
        """Whether the train role has to keep the weights of the start."""
        return self.weights == "initial"


@dataclass(frozen=True, kw_only=True)
class GKDConfig(SamplingOptions, OverlapOptions):
    """Generalised knowledge distillation (arXiv:2306.13649): the student learns the teacher's next-token distributions.

    In a share `lmbda` of the steps it does so on responses of its own, in the others on those of the dataset. Rows with
    a `teacher_prompt` let the teacher see that prompt instead (on-policy self-distillation). `temperature` is that of
    the samples and of both distributions that are compared.
    """

    global_batch_size: Annotated[int, Ge(1)] = 32
    """Rows an optimizer step, each a prompt with one response."""
    beta: Annotated[float, Ge(0), Le(1)] = 0.5
    """The divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them the generalised
    Jensen-Shannon divergence, which tends to 0 at both ends."""
    lmbda: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of steps on the student's own samples, drawn by the run's seed; the others need dataset responses."""
    sft_alpha: Annotated[float, Ge(0)] = 0.0
    """Weight of the cross-entropy that is added in steps on dataset responses."""
    gkd_logits_topk: int | None = None
    """Compare the teacher's K likeliest tokens a position; null: the whole vocabulary."""
    topk_mode: Literal["renormalize", "tail"] | None = None
    """renormalize: both sides over those K alone. tail: one more bin for the rest on both sides. null: renormalize."""
    loss: LossSpec | None = None
    """The loss, a class or a function by `_target_`; null: `rolegraph.losses.distill.DistillLoss` with the options
    above."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before distillation; null: none."""

    @property
    def draws_samples(self) -> bool:
        """Whether training asks for a rollout."""
        return self.lmbda > 0

    @property
    def mode(self) -> Literal["renormalize", "tail"] | None:
        """How top-K tokens are compared; null over the whole vocabulary."""
        return (self.topk_mode or "renormalize") if self.gkd_logits_topk else None

    @property
    def needs_reference(self) -> bool:
        """Whether the train role keeps reference weights; a teacher that is the policy itself may want them."""
        return False

    @property
    def data_needs(self) -> Needs:
        """What every dataset row must have."""
        return "prompt" if self.lmbda == 1 and self.warm_start is None else "response"

    @property
    def note(self) -> str:
        """What a person should know about these settings; empty where there is nothing to say."""
        return beta_near_end("algorithm.beta", self.beta) or ""

    def loss_spec(self, *, on_policy: bool, teacher_temperature: float | None) -> LossSpec:
        """The loss of a step; `teacher_temperature` is that of the teacher's logprobs, null: `temperature`."""
        if self.loss is not None:
            return self.loss
        return LossSpec(
            DISTILL_LOSS,
            {
                "beta": self.beta,
                "topk_mode": self.mode,
                "sft_alpha": 0.0 if on_policy else self.sft_alpha,
                "teacher_temperature": teacher_temperature,
            },
        )

    def check(self, run: RunLike) -> Iterator[str]:
        """What is wrong with these settings taken together, one sentence each."""
        yield from self.check_overlap()
        yield from self._check_mixture(run)
        yield from self._check_topk()
        if "teacher" in run.roles:
            yield from self._check_teacher(run)

    def _check_mixture(self, run: RunLike) -> Iterator[str]:
        if self.lmbda > 0 and "rollout" not in run.roles:
            yield f"algorithm.lmbda={self.lmbda:g} asks for samples: set rollout=vllm, or algorithm.lmbda=0"
        if self.lmbda == 1 and self.sft_alpha > 0:
            yield (
                f"algorithm.sft_alpha={self.sft_alpha:g} has no effect with lmbda=1, where no step is on dataset "
                "responses: lower algorithm.lmbda, or remove it"
            )
        if self.lmbda == 0 and self.max_staleness:
            yield f"algorithm.max_staleness={self.max_staleness} has no effect with lmbda=0: remove it"

    def _check_topk(self) -> Iterator[str]:
        count = self.gkd_logits_topk
        if count is None:
            if self.topk_mode is not None:
                yield (
                    f"algorithm.topk_mode={self.topk_mode} has no effect without gkd_logits_topk, where the whole "
                    "vocabulary is compared: set algorithm.gkd_logits_topk, or remove it"
                )
        elif count < 1:
            yield f"algorithm.gkd_logits_topk={count} must be at least 1, or null for the whole vocabulary"
        elif count == 1 and self.mode == "renormalize":
            yield (
                "algorithm.gkd_logits_topk=1 renormalised carries no signal (both sides are 1): set it to 2 or more, "
                "or algorithm.topk_mode=tail"
            )

    def _check_teacher(self, run: RunLike) -> Iterator[str]:
        teachers = [role for role in run.roles if is_teacher(role)]
        if self.gkd_logits_topk is None and len(teachers) > 1:
            yield (
                f"algorithm.gkd_logits_topk=null compares the whole vocabulary, for which the trainer holds the head "
                f"of one teacher, and there are {len(teachers)} ({', '.join(teachers)}): set "
                "algorithm.gkd_logits_topk=64, or keep one"
            )
        for role in teachers:
            spec = run.roles[role]
            if self.gkd_logits_topk is None and not getattr(spec.config, "gives_hidden", False):
                yield (
                    f"algorithm.gkd_logits_topk=null compares the whole vocabulary, and {role}={spec.name} gives top-K "
                    f"logprobs alone: set algorithm.gkd_logits_topk=64, or {role}=megatron or huggingface"
                )
            if self.mode == "tail" and self.temperature != 1 and not getattr(spec.config, "temperatures", False):
                yield (
                    f"algorithm.topk_mode=tail at temperature={self.temperature:g} needs teacher logprobs at that "
                    f"temperature, and those of {role}={spec.name} are always of temperature 1: set "
                    f"algorithm.topk_mode=renormalize, algorithm.temperature=1, or {role}=megatron or huggingface"
                )
