"""Settings of the teacher roles. Light: composing and planning a config imports no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolegraph.errors import ConfigError
from rolegraph.models.config import ModelConfig
from roles.train.config import MegatronModelConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTeacherConfig:
    """Any causal language model that transformers knows; each replica holds all of it."""

    temperatures: ClassVar[bool] = True
    """Told to algorithms: logprobs are those at the temperature asked for."""
    gives_hidden: ClassVar[bool] = True
    """Told to algorithms: the whole distribution can be had, as hidden states."""

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
    """Hugging Face folder or name, or a choice as in `model@teacher.model=smollm2_135m`; null: the policy's."""
    dtype: DType = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    max_tokens_per_micro_batch: int = 4096
    """Tokens in one forward pass, padding counted; a longer row is a pass of its own."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        if not isinstance(self.model, str):
            raise ConfigError("teacher.model is not set: give a Hugging Face folder")
        return self.model

    def check(self, run: Any) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        sharing = any("teacher" in group for group in run.placement.sharing(run.roles))
        if self.pipeline_model_parallel_size > 1 and run.placement.offload_teacher_model and sharing:
            yield (
                f"teacher.pipeline_model_parallel_size={self.pipeline_model_parallel_size}: a model that transformers "
                "spreads over GPUs cannot step aside; set placement.offload_teacher_model=false, or teacher=megatron"
            )

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        if self.replicas is not None and self.ranks is not None and self.replicas != self.ranks:
            yield f"teacher.replicas={self.replicas} and teacher.ranks={self.ranks} name the same number: give one"
        for name in ("pipeline_model_parallel_size", "max_tokens_per_micro_batch"):
            if getattr(self, name) < 1:
                yield f"teacher.{name}={getattr(self, name)} must be at least 1"


@dataclass
class MegatronTeacherConfig(MegatronModelConfig):
    """A forward-only model on a mesh of ranks of its own, which need not be the student's."""

    node: ClassVar[str] = "teacher"
    temperatures: ClassVar[bool] = True
    gives_hidden: ClassVar[bool] = True
