"""What `model:` in a config may say. Light imports only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rolegraph.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """The policy's starting weights: a Hugging Face folder or hub name, or a function that makes one."""

    path: str | None = None
    """A Hugging Face folder, or a name on the hub."""
    revision: str | None = None
    """The revision of a model on the hub."""
    maker: str | None = None
    """Import path of a function `make(folder, **args)` that writes a Hugging Face folder; made once and kept."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the maker; each set of values is a model of its own."""

    def problems(self) -> list[str]:
        """What is wrong with these settings taken together, one sentence each, with the key and what to type."""
        if (self.path is None) == (self.maker is None):
            was = "neither is set" if self.path is None else f"both are set ({self.path!r} and {self.maker!r})"
            return [f"model needs either model.path or model.maker, and {was}: try model=tiny or model.path=FOLDER"]
        found = []
        if self.maker is not None and "." not in self.maker:
            found.append(f"model.maker={self.maker!r} is no import path: write module.function")
        if self.args and self.maker is None:
            found.append("model.args are the arguments of model.maker, which is not set: remove them")
        if self.revision is not None and self.path is None:
            found.append("model.revision is for a model.path on the hub: remove it")
        return found


def folder_of(model: str | ModelConfig | None, role: str) -> str:
    """The Hugging Face folder or name of a role's model; ConfigError before the run has found it."""
    if not isinstance(model, str):
        raise ConfigError(f"{role}.model is not set: give a Hugging Face folder")
    return model
