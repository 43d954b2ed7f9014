"""Settings of judges: generative models that are asked what a response is worth. Light: no engine, no client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from rolegraph.services.config import ServiceConfig
from roles.rollout.config import MAX_TEMPERATURE, VLLMDrawingConfig, VLLMEngineConfig

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig

GIVEN = ("question", "response", "steps")
"""What a prompt may say beside the columns of the rows."""
_EVERYWHERE = ("replicas", "ranks", "gpus", "cpus")
"""Keys of an engine that mean the same to a role that asks a service."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(VLLMDrawingConfig):
    """A judge behind an OpenAI-compatible endpoint where `service` is set, else a vLLM engine in each replica."""

    node: ClassVar[str]
    reloads_weights: ClassVar[bool] = False
    reads_text: ClassVar[bool] = True
    """Told to the rules on lengths: the role writes its own prompts, and one that is too long has no reply."""
    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**VLLMDrawingConfig.owned, "weight_transfer_config": "a judge's weights never change: remove it"}
    )

    service: ServiceConfig | None = None
    """The endpoint that is asked. Null: an engine with `model`, whose settings have no effect otherwise."""
    policy: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""
    max_model_len: int | None = None
    """Tokens of the judge's prompt and reply together. Null: as many as its model has positions."""
    prompt: str = ""
    """What the judge is asked: a Jinja template of `question`, `response`, `steps` (a list) and any column."""
    system_prompt: str | None = None
    """Put before it as the system's message, as it is."""
    temperature: float = 0.0
    """0 takes the likeliest tokens."""
    top_p: float = 1.0
    max_tokens: int = 1024
    """Tokens of a reply."""
    pattern: str | None = None
    """A regular expression whose only group is a score. Null: JSON, or what the default prompt asks for."""
    lowest: float = 0.0
    highest: float = 1.0
    """A score outside these bounds is none: the reply was about something else."""

    @property
    def never_on_gpu(self) -> bool:
        """Told to placement: whether the role takes no device, and cores for moments only."""
        return self.service is not None

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        return [*super().problems(), *self._judge_problems(), *self._service_problems()]

    def check(self, run: RunConfig) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        if self.service is None:
            yield from VLLMEngineConfig.check(self, run)

    def _judge_problems(self) -> Iterator[str]:
        node = self.node
        yield from template_problems(node, self.prompt)
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                yield f"{node}.pattern={self.pattern!r} is no regular expression: {error}"
            else:
                if groups != 1:
                    yield f"{node}.pattern={self.pattern!r} has {groups} groups: give it one, around the score"
        if not self.lowest < self.highest:
            yield f"{node}.lowest={self.lowest:g} must be below {node}.highest={self.highest:g}"
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            yield f"{node}.temperature={self.temperature:g} must be between 0 and {MAX_TEMPERATURE:g}"
        if not 0 < self.top_p <= 1:
            yield f"{node}.top_p={self.top_p:g} must be above 0, at most 1"
        if self.max_tokens < 1:
            yield f"{node}.max_tokens={self.max_tokens} must be at least 1"

    def _service_problems(self) -> Iterator[str]:
        """An engine's settings say nothing to a service."""
        if self.service is None:
            return
        engine = {field.name for field in fields(VLLMDrawingConfig)} - {*_EVERYWHERE, "seed"}
        for field in fields(self):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if field.name in engine and getattr(self, field.name) != default:
                yield (
                    f"{self.node}.{field.name}={getattr(self, field.name)} is an engine's, and {self.node}.service is "
                    f"asked: remove it, or set {self.node}.service=null"
                )
        if self.gpus:
            yield f"{self.node}.gpus={self.gpus}: the model is the service's, and nothing here runs on a device; set 0"


def template_problems(node: str, prompt: str) -> Iterator[str]:
    """What is wrong with a judge's prompt."""
    from jinja2 import TemplateSyntaxError

    try:
        names = names_in(prompt)
    except TemplateSyntaxError as error:
        yield f"{node}.prompt is no Jinja template: line {error.lineno}: {error.message}"
        return
    if not names & {"response", "steps"}:
        yield f"{node}.prompt says nothing of the response: write {{{{ response }}}} or {{{{ steps }}}} where it stands"


def names_in(prompt: str) -> set[str]:
    """The variables that a template has to be given. Raises TemplateSyntaxError."""
    from jinja2 import Environment, meta

    return meta.find_undeclared_variables(Environment(autoescape=False).parse(prompt))
