"""Settings of the sampler roles. Light: composing and planning a config imports no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rolegraph.models.config import ModelConfig, folder_of
from rolegraph.services.config import ClientConfig
from roles.rollout.config import VLLMDrawingConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]


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
class HuggingFaceSamplerConfig:
    """Any causal language model that transformers knows; each replica holds all of it."""

    replicas: int | None = None
    """Copies of the model; each is one actor. Null: derived from `gpus`, or 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Devices of all replicas together."""
    cpus: float | None = None
    """Cores a replica on a CPU; fractions allowed. Null: derived from the plan."""
    pipeline_model_parallel_size: int = 1
    """GPUs that a replica's layers are spread over."""

    model: str | ModelConfig | None = None
    """Hugging Face folder or name, or a choice as in `model@sampler.model=smollm2_135m`; null: the run's model."""
    dtype: DType = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    max_num_seqs: int = 32
    """Candidates drawn at once, those with prompts of like length together."""
    cache: Literal["dynamic", "static"] = "dynamic"
    """Of keys and values. static: of one size from the first step on, with which transformers compiles the decoding
    step on a GPU; it pays where many batches have like lengths, for each new size is compiled anew."""
    seed: int | None = None
    """Seed of draws without a seed of their own. Null: the run's."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, "sampler")

    def check(self, run: Any) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        role = next((role for role, spec in run.roles.items() if spec.config is self), "sampler")
        sharing = any(role in group for group in run.placement.sharing(run.roles))
        if self.pipeline_model_parallel_size > 1 and sharing and run.placement.sleep_level:
            yield (
                f"{role}.pipeline_model_parallel_size={self.pipeline_model_parallel_size}: a model that transformers "
                f"spreads over GPUs cannot step aside; set placement.sleep_level=0, or {role}=vllm"
            )

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        for name in ("pipeline_model_parallel_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                yield f"sampler.{name}={getattr(self, name)} must be at least 1"


@dataclass(frozen=True, kw_only=True)
class OpenAISamplerConfig(ClientConfig):
    """Candidates from an OpenAI-compatible endpoint."""

    takes_text: ClassVar[bool] = True
    """Told to the algorithm: the role reads messages, and nothing is tokenised for it."""
