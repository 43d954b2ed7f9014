"""Settings of roles that draw by a model of transformers. Light: composing and planning a config imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolegraph.models.config import ModelConfig, folder_of
from roles.frozen_config import FrozenModelConfig


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDrawingConfig(FrozenModelConfig):
    """Any causal language model that transformers knows; each replica holds all of it."""

    node: ClassVar[str]
    """The role's name in the config, for messages."""

    pipeline_model_parallel_size: int = 1
    """GPUs that a replica's layers are spread over."""

    model: str | ModelConfig | None = None
    """Hugging Face folder or name; null: the run's model."""
    max_num_seqs: int = 32
    """Samples drawn at once, those with prompts of like length together."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU that weights and cache may take. Null: by the plan (0.9 alone, less where roles share it)."""
    kv_cache_bytes: int | None = None
    """Memory of a batch's keys and values, which bounds its samples. Null: what `gpu_memory_utilization` leaves on a
    GPU, an eighth of the free memory on a CPU; for a sample at least."""
    cache: Literal["dynamic", "static"] = "dynamic"
    """Of keys and values. dynamic: samples that have ended leave the batch, attention sees what is filled. static: all
    shapes stay those of the first step, with which transformers compiles the decoding step on a GPU; it pays where many
    batches have like lengths, for each new size is compiled anew."""
    seed: int | None = None
    """Seed of draws without a seed of their own. Null: the run's."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, self.node)

    def check(self, run: Any) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        role = next((role for role, spec in run.roles.items() if spec.config is self), self.node)
        sharing = any(role in group for group in run.placement.sharing(run.roles))
        if self.pipeline_model_parallel_size > 1 and sharing and run.placement.sleep_level:
            yield (
                f"{role}.pipeline_model_parallel_size={self.pipeline_model_parallel_size}: a model that transformers "
                f"spreads over GPUs cannot step aside; set placement.sleep_level=0, or {role}=vllm"
            )

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        for name in ("pipeline_model_parallel_size", "max_num_seqs", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{self.node}.{name}={value} must be at least 1"
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            yield f"{self.node}.gpu_memory_utilization={share} must be a share of the device: above 0, at most 1"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceRolloutConfig(HuggingFaceDrawingConfig):
    """A model of transformers that samples from the policy."""

    node: ClassVar[str] = "rollout"

    model: str | None = None
    """Hugging Face folder or name; null: the policy's."""
    max_model_len: int | None = None
    """Tokens of prompt and response together. Null: `data.max_length + algorithm.max_completion_length`."""
    max_num_seqs: int = 256

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        yield from super().problems()
        if self.max_model_len is not None and self.max_model_len < 1:
            yield f"{self.node}.max_model_len={self.max_model_len} must be at least 1"
