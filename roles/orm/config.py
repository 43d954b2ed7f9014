"""Settings of the outcome-reward role. Light: composing and planning a config imports no verifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rolegraph.rewards.config import RewardConfig
from roles.reward.config import RewardModelConfig, form_problems
from roles.reward.judge_config import JudgeConfig
from roles.rollout.config import VLLMEngineConfig


@dataclass(frozen=True, kw_only=True)
class FunctionORMConfig:
    """Reward functions in worker processes; the functions themselves are named in `reward`."""

    never_on_gpu: ClassVar[bool] = True
    """Told to placement: the role takes no device, and cores for moments only."""

    replicas: int | None = None
    """Actors, each with worker processes of its own. Null: 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Reward functions use no device: 0 or null."""
    cpus: float | None = None
    """Cores a replica; fractions allowed. Null: derived from the plan."""
    model: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""
    skip_special_tokens: bool = True
    """Leave out special tokens (end of sequence, chat marks) from the text that functions see."""
    reward: RewardConfig | None = None
    """Null: the config's `reward`."""

    def __post_init__(self) -> None:
        if self.gpus:
            raise ValueError(f"gpus={self.gpus}: reward functions run on CPU cores; set cpus instead")


@dataclass(frozen=True, kw_only=True)
class ClassifierORMConfig(RewardModelConfig):
    """A sequence classifier that transformers runs."""

    node: ClassVar[str] = "orm"

    name: str = "classifier"
    """The column is `rewards/NAME`."""
    label: int | str | None = None
    """Which of a head's several labels is the score, by number or name. Null: the head has one number."""
    value: Literal["logit", "probability"] = "logit"
    """The head's number as it is, or between 0 and 1: its sigmoid, or the softmax over several labels."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        yield from super().problems()
        yield from name_problems(self.node, self.name)


def name_problems(node: str, name: str) -> Iterator[str]:
    """What is wrong with the name of a column."""
    if not name or "/" in name:
        yield f"{node}.name={name!r} names the column rewards/NAME: give a word without a slash"


@dataclass(frozen=True, kw_only=True)
class VLLMClassifierORMConfig(VLLMEngineConfig):
    """A sequence classifier that vLLM runs."""

    node: ClassVar[str] = "orm"
    reloads_weights: ClassVar[bool] = False
    reads_text: ClassVar[bool] = True
    """Told to the rules on lengths: the role tokenises texts itself, and one that is too long has no score."""
    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "runner": "the role needs a classifier: remove it",
            "convert": "the role needs a classifier: remove it",
            "pooler_config": "set `value` of the role",
            "enable_sleep_mode": "set `enable_sleep_mode` of the role",
            "seed": "a classifier draws nothing: remove it",
            "worker_extension_cls": "the role's workers get their kernels by it",
        }
    )

    policy: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""
    max_model_len: int | None = None
    """Tokens of prompt and response together; a longer row has no score. Null: as many as the model has positions."""
    form: str | None = None
    """How both stand in what the model reads, as in `"{prompt} {response}"`. Null: by the model's chat template."""
    name: str = "classifier"
    """The column is `rewards/NAME`."""
    label: int | str | None = None
    """Which of a head's several labels is the score, by number or name. Null: the head has one number."""
    value: Literal["logit", "probability"] = "logit"
    """The head's number as it is, or between 0 and 1: its sigmoid, or the softmax over several labels."""

    def engine_values(self) -> dict[str, Any]:
        """An engine that pools."""
        return {"runner": "pooling", "enable_prefix_caching": False}

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = [*super().problems(), *form_problems(self.node, self.form), *name_problems(self.node, self.name)]
        if self.model is None:
            found.append(f"{self.node}.model is not set: give the Hugging Face folder or name of the reward model")
        return found


ORM_PROMPT = """\
A question and a response to it follow. Say whether the response answers the question correctly.

<question>
{{ question }}
</question>

<response>
{{ response }}
</response>

Think it through first. End with a line of the form `Score: X`, where X is a number from 0 (wrong) to 1 (right)."""


@dataclass(frozen=True, kw_only=True)
class JudgeORMConfig(JudgeConfig):
    """A judge that gives a response one score."""

    node: ClassVar[str] = "orm"

    name: str = "judge"
    """The column is `rewards/NAME`."""
    prompt: str = ORM_PROMPT
    """What the judge is asked: a Jinja template of `question`, `response`, `steps` (a list) and any column."""

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        return [*super().problems(), *name_problems(self.node, self.name)]
