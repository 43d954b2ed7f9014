"""Settings of the process-reward roles. Light: composing and planning a config imports no model and no verifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rolegraph.rewards.config import RewardConfig
from rolegraph.rewards.steps import SEPARATOR
from roles.reward.config import RewardModelConfig
from roles.reward.judge_config import JudgeConfig

STEP, TOKEN = "{step}", "{token}"


class PRMConfig(Protocol):
    """What every process reward needs to know."""

    @property
    def step_separator(self) -> str:
        """What stands between two steps of a response."""

    @property
    def policy(self) -> str | None:
        """Folder whose tokenizer turns response ids into text."""


def separator_problems(node: str, separator: str) -> Iterator[str]:
    """What is wrong with what stands between two steps."""
    if not separator:
        yield f'{node}.step_separator is empty: give what stands between two steps, as in "\\n\\n"'


@dataclass(frozen=True)
class FunctionPRMConfig(RewardConfig):
    """Functions of steps in worker processes: `f(steps, *, columns..., settings...)`, one list of numbers a response.

    Example:
        reward_funcs: [arithmetic_steps, my_rewards.short_steps]
        reward_weights: [1, 0.1]
    """

    node: ClassVar[str] = "prm"
    scores_steps: ClassVar[bool] = True
    never_on_gpu: ClassVar[bool] = True
    """Told to placement: the role takes no device, and cores for moments only."""

    step_separator: str = SEPARATOR
    """What stands between two steps of a response."""
    replicas: int | None = None
    """Actors, each with worker processes of its own. Null: 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Functions use no device: 0 or null."""
    cpus: float | None = None
    """Cores a replica; fractions allowed. Null: derived from the plan."""
    policy: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = [*super().problems(), *separator_problems(self.node, self.step_separator)]
        if self.gpus:
            found.append(f"{self.node}.gpus={self.gpus}: functions run on CPU cores; set cpus instead")
        return found


@dataclass(frozen=True, kw_only=True)
class ModelPRMConfig(RewardModelConfig):
    """A reward model that scores at a token behind each step.

    With `good_token` and `bad_token` it is a causal language model, and a score the probability of the good one among
    both (Math-Shepherd, arXiv:2312.08935); else a token classifier, as Qwen2.5-Math-PRM is (arXiv:2501.07301).
    """

    node: ClassVar[str] = "prm"

    step_separator: str = SEPARATOR
    """What stands between two steps of a response."""
    step_form: str = "{step}{token}"
    """How a step stands in what the model reads, with the token behind it that is scored: `"{step} {token}\\n"`."""
    token: str | None = None
    """The token behind each step: `<extra_0>` of Qwen2.5-Math-PRM, the Cyrillic `\u043a\u0438` of Math-Shepherd."""
    good_token: str | None = None
    """What the model says after a good step."""
    bad_token: str | None = None
    """What it says after a bad one."""
    label: int | str | None = None
    """Which label of a token classifier means a good step. Null: 1 of two labels, or the only one."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        yield from super().problems()
        yield from separator_problems(self.node, self.step_separator)
        if not self.token:
            yield f"{self.node}.token is not set: give the token that the model scores behind each step, as <extra_0>"
        if not (self.step_form.count(STEP) == self.step_form.count(TOKEN) == 1) or (
            self.step_form.index(STEP) > self.step_form.index(TOKEN)
        ):
            yield f"{self.node}.step_form={self.step_form!r} must have {STEP}, and behind it {TOKEN}, once each"
        if (self.good_token is None) != (self.bad_token is None):
            yield f"{self.node}.good_token and {self.node}.bad_token go together: set both, or neither"
        if self.good_token is not None and self.label is not None:
            yield f"{self.node}.label is a token classifier's, and {self.node}.good_token a language model's: set one"


PRM_PROMPT = """\
A question and a response to it follow, step by step. Say of each step whether it is correct.

<question>
{{ question }}
</question>
{% for step in steps %}
<step_{{ loop.index }}>
{{ step }}
</step_{{ loop.index }}>
{% endfor %}
Think it through first. End with a JSON list of {{ steps | length }} numbers, one for each step in order, each from \
0 (wrong) to 1 (right)."""


@dataclass(frozen=True, kw_only=True)
class JudgePRMConfig(JudgeConfig):
    """A judge that gives each step of a response a score."""

    node: ClassVar[str] = "prm"

    step_separator: str = SEPARATOR
    """What stands between two steps of a response."""
    prompt: str = PRM_PROMPT
    """What the judge is asked: a Jinja template of `question`, `response`, `steps` (a list) and any column."""

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        return [*super().problems(), *separator_problems(self.node, self.step_separator)]
