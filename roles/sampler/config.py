"""Settings of the sampler roles. Light: composing and planning a config imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from rolegraph.models.config import ModelConfig
from rolegraph.services.config import ClientConfig
from roles.rollout.config import VLLMDrawingConfig
from roles.rollout.huggingface_config import HuggingFaceDrawingConfig


@dataclass(frozen=True, kw_only=True)
class VLLMSamplerConfig(VLLMDrawingConfig):
    """Engines that draw candidates from a model nobody trains."""

    node: ClassVar[str] = "sampler"
    reloads_weights: ClassVar[bool] = False
    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**VLLMDrawingConfig.owned, "weight_transfer_config": "a sampler's weights never change: remove it"}
    )

    model: str | ModelConfig | None = None
    """Hugging Face folder or name, or a choice as in `model@sampler.model=smollm2_135m`; null: the run's model."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSamplerConfig(HuggingFaceDrawingConfig):
    """Candidates from a model of transformers that nobody trains."""

    node: ClassVar[str] = "sampler"

    model: str | ModelConfig | None = None
    """Hugging Face folder or name, or a choice as in `model@sampler.model=smollm2_135m`; null: the run's model."""


@dataclass(frozen=True, kw_only=True)
class OpenAISamplerConfig(ClientConfig):
    """Candidates from an OpenAI-compatible endpoint."""

    takes_text: ClassVar[bool] = True
    """Told to the algorithm: the role reads messages, and nothing is tokenised for it."""
