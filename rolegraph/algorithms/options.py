"""Options that several algorithms have. Light imports only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from rolegraph.interfaces import SamplingParams
from rolegraph.role import is_scorer

Needs = Literal["prompt", "response", "text", "chat"]
"""What an algorithm reads of its data: prompts in tokens, with responses, raw text, or prompts as text."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps on the dataset's responses before RL begins."""

    max_steps: Annotated[int, Ge(1)]
    """Optimizer steps of the warm start."""
    global_batch_size: Annotated[int, Ge(1)] | None = None
    """Rows an optimizer step; null: the algorithm's."""
    lr: Annotated[float, Gt(0)] | None = None
    """A constant learning rate; null: the train role's schedule."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """Whether samples are drawn while earlier ones are trained on; needs roles on devices of their own."""

    max_staleness: Annotated[int, Ge(0)] = 0
    """Weight versions that a sample's first token may be behind the trainer when it is trained on. 0: strictly in turn;
    k: generation runs up to k weight syncs ahead of training, and the loss corrects by the rollout's logprobs."""
    on_sync: Literal["keep", "drain"] | None = None
    """What becomes of samples that are being drawn when new weights come. keep: they go on with these, from a cache
    computed anew. drain: prompts that engines have begun are finished first, others wait. null: keep."""

    def check_overlap(self) -> Iterator[str]:
        """Options that would be ignored."""
        if self.on_sync is not None and not self.max_staleness:
            yield (
                "algorithm.on_sync has no effect with max_staleness=0, where no sample is being drawn at a sync: "
                "remove it, or set algorithm.max_staleness to 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are drawn."""

    max_completion_length: Annotated[int, Ge(1)] = 256
    """Tokens a response may have."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Of the samples, and of every logprob."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to draw from; 0: all."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0

    def sampling(self, *, n: int, seed: int, step: int) -> SamplingParams:
        """`n` samples a prompt; `step` numbers the calls of a run, so that no two of its samples share a seed."""
        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_completion_length,
            seed=seed,
            step=step,
        )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What the reward roles of a run (prm, orm, orm_NAME) count in a response's total score."""

    score_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each role's score in the sum, by the role's name; 1 for those that are not named. A response without a
    score of one of them has no total, unless that role's weight is 0."""

    def check_weights(self, roles: Iterable[str]) -> Iterator[str]:
        """Weights of roles that are not there."""
        scorers = [role for role in roles if is_scorer(role)]
        for role in self.score_weights:
            if role not in scorers:
                yield (
                    f"algorithm.score_weights names `{role}`, and the reward roles of this run are "
                    f"{', '.join(scorers) or 'none'}: remove it, or name one of those"
                )
