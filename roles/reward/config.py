"""Settings of reward models that transformers runs. Light: composing and planning a config imports no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rolegraph.models.config import ModelConfig, folder_of
from roles.frozen_config import FrozenModelConfig

PROMPT, RESPONSE = "{prompt}", "{response}"


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(FrozenModelConfig):
    """A model that reads prompt and response; each replica holds all of it."""

    node: ClassVar[str]
    """The role's name in the config, for messages."""
    reads_text: ClassVar[bool] = True
    """Told to the rules on lengths: the role tokenises texts itself, and one that is too long has no score."""

    model: str | ModelConfig | None = None
    """Hugging Face folder or name of the reward model; it has to be given."""
    policy: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""
    max_tokens_per_micro_batch: int = 4096
    """Tokens in one forward pass, padding counted; a longer row is a pass of its own."""
    max_length: int | None = None
    """Tokens of prompt and response together; a longer row has no score. Null: as many as the model has positions."""
    form: str | None = None
    """How both stand in what the model reads, as in `"{prompt} {response}"`. Null: by the model's chat template."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, self.node)

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        node = self.node
        if self.model is None:
            yield f"{node}.model is not set: give the Hugging Face folder or name of the reward model"
        for name in ("max_tokens_per_micro_batch", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{node}.{name}={value} must be at least 1"
        yield from form_problems(node, self.form)


def form_problems(node: str, form: str | None) -> Iterator[str]:
    """What is wrong with how prompt and response are to stand together."""
    if form is not None and not (form.count(PROMPT) == form.count(RESPONSE) == 1):
        yield f"{node}.form={form!r} must have {PROMPT} and {RESPONSE} once each"


def labels_problem(role: str, label: int | str | None, names: dict[int, str], key: str) -> str | None:
    """What is wrong with naming one of a head's labels, if anything."""
    known = ", ".join(f"{number} ({name})" for number, name in sorted(names.items()))
    if len(names) == 1:
        return None if label is None else f"{role}.{key}={label!r}: the model's head has one number: set it to null"
    if label is None:
        return f"{role}.{key} is not set, and the model's head has several: choose one of {known}"
    if label not in names and label not in names.values():
        return f"{role}.{key}={label!r} is no label of the model: choose one of {known}"
    return None


def label_index(label: int | str | None, names: dict[int, str]) -> int:
    """The place of a label that is one of `names`."""
    if label is None:
        return 0
    return label if isinstance(label, int) else next(number for number, name in names.items() if name == label)


def value_of(config: Any, name: str) -> Any:
    """A number of a model's config, where it has text and other parts too."""
    return getattr(config.get_text_config(), name, None)
