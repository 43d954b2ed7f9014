"""Settings of the teacher roles. Light: composing and planning a config imports no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rolegraph.models.config import ModelConfig, folder_of
from roles.frozen_config import FrozenModelConfig
from roles.rollout.config import VLLMEngineConfig
from roles.train.config import MegatronModelConfig

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig

STEP_TOKENS = 2048
"""Tokens of an engine's step on a GPU, unless `engine_kwargs` says otherwise. Prompt logprobs take a few float32
logits for each token of a step over the whole vocabulary, which vLLM does not count when it sizes its KV cache: 1.2
GiB for a vocabulary of 150,000, each."""


def _role_of(config: Any, run: RunConfig) -> str:
    """The role that has this config: a run may have several teachers."""
    return next((role for role, spec in run.roles.items() if spec.config is config), "teacher")


def _steps_aside(role: str, run: RunConfig) -> bool:
    """Whether a teacher gives its memory to the roles that share its devices."""
    sharing = any(role in group for group in run.placement.sharing(run.roles))
    return sharing and run.placement.offload_teacher_model


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTeacherConfig(FrozenModelConfig):
    """Any causal language model that transformers knows; each replica holds all of it."""

    temperatures: ClassVar[bool] = True
    """Told to algorithms: logprobs are those at the temperature asked for."""
    gives_hidden: ClassVar[bool] = True
    """Told to algorithms: the whole distribution can be had, as hidden states."""

    pipeline_model_parallel_size: int = 1
    """GPUs that a replica's layers are spread over."""

    model: str | ModelConfig | None = None
    """Hugging Face folder or name, or a choice as in `model@teacher.model=smollm2_135m`; null: the policy's."""
    max_tokens_per_micro_batch: int = 4096
    """Tokens in one forward pass, padding counted; a longer row is a pass of its own."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, "teacher")

    def check(self, run: Any) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        role = _role_of(self, run)
        if self.pipeline_model_parallel_size > 1 and _steps_aside(role, run):
            yield (
                f"{role}.pipeline_model_parallel_size={self.pipeline_model_parallel_size}: a model that transformers "
                "spreads over GPUs cannot step aside; set placement.offload_teacher_model=false, or teacher=megatron"
            )

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, each naming its key."""
        for name in ("pipeline_model_parallel_size", "max_tokens_per_micro_batch"):
            if getattr(self, name) < 1:
                yield f"teacher.{name}={getattr(self, name)} must be at least 1"


@dataclass
class MegatronTeacherConfig(MegatronModelConfig):
    """A forward-only model on a mesh of ranks of its own, which need not be the student's."""

    node: ClassVar[str] = "teacher"
    temperatures: ClassVar[bool] = True
    gives_hidden: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class VLLMTeacherConfig(VLLMEngineConfig):
    """Engines that score responses as part of their prompt.

    There is no prefix caching to switch: vLLM computes a prompt whose logprobs are asked for from its first token on.
    """

    node: ClassVar[str] = "teacher"
    reloads_weights: ClassVar[bool] = False
    temperatures: ClassVar[bool] = False
    gives_hidden: ClassVar[bool] = False
    drawn_tokens: ClassVar[int] = 1
    """Told to the rules on lengths: an engine draws at least a token after what it scores."""
    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_prefix_caching": "prompts whose logprobs are asked for do not use it: remove it",
            "enable_sleep_mode": "set `placement.offload_teacher_model`, or `enable_sleep_mode` of the role",
            "max_logprobs": "set `max_logprobs` of the role",
            "logprobs_mode": "the role needs logprobs",
            "seed": "a teacher draws nothing: remove it",
            "worker_extension_cls": "the role's workers get their kernels by it",
        }
    )

    model: str | ModelConfig | None = None
    """Hugging Face folder or name, or a choice as in `model@teacher.model=smollm2_135m`; null: the policy's."""
    max_model_len: int | None = None
    """Tokens of prompt and response together, and one more. Null: of the longest row, by `data` and `algorithm`."""
    max_logprobs: int | None = None
    """Tokens a position that may be asked for. Null: as many as the vocabulary has."""

    def engine_values(self) -> dict[str, Any]:
        """Prompt logprobs are always those of temperature 1."""
        limit = -1 if self.max_logprobs is None else self.max_logprobs
        return {
            "enable_prefix_caching": False,
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": limit,
            # On a CPU a prompt is never split, and this is set to its length.
            "max_num_batched_tokens": max(STEP_TOKENS, self.max_num_seqs),
        }

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = super().problems()
        if self.max_logprobs is not None and self.max_logprobs < 1:
            found.append(f"{self.node}.max_logprobs={self.max_logprobs} must be at least 1, or null for no limit")
        return found

    def check(self, run: RunConfig) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        yield from super().check(run)
        role = _role_of(self, run)
        if self.enable_sleep_mode is False and _steps_aside(role, run):
            yield (
                f"{role}.enable_sleep_mode=false contradicts placement.offload_teacher_model=true: remove it, or set "
                "placement.offload_teacher_model=false"
            )
        topk = getattr(run.algorithm.config, "gkd_logits_topk", None)
        if topk is None or self.max_logprobs is None or topk <= self.max_logprobs:
            return
        yield (
            f"algorithm.gkd_logits_topk={topk} is more than {role}.max_logprobs={self.max_logprobs}: lower it, or set "
            f"{role}.max_logprobs={topk} or null"
        )
