"""Config of the Megatron train role, and the rules on it that need no Megatron to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rolegraph.models.config import ModelConfig, folder_of
from roles.train.tuner import TunerConfig

DEFAULT_MICRO_BATCH_ROWS = 4
"""Of the longest length; as many shorter ones as `microbatch.ACTIVATION_BYTES` hold."""

TRANSFORMER_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"
OPTIMIZER_CONFIG = "megatron.core.optimizer.optimizer_config.OptimizerConfig"

OWNED_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tensor_model_parallel_size": "train.tensor_model_parallel_size",
        "pipeline_model_parallel_size": "train.pipeline_model_parallel_size",
        "context_parallel_size": "train.context_parallel_size",
        "expert_model_parallel_size": "train.expert_model_parallel_size",
        "sequence_parallel": "train.sequence_parallel",
        "params_dtype": "train.dtype",
        "pipeline_dtype": "train.dtype",
        "autocast_dtype": "train.dtype",
        "bf16": "train.dtype",
        "fp16": "train.dtype",
        "lr": "train.lr",
        "min_lr": "train.min_lr",
        "weight_decay": "train.weight_decay",
        "clip_grad": "train.clip_grad",
        "adam_beta1": "train.adam_beta1",
        "adam_beta2": "train.adam_beta2",
        "adam_eps": "train.adam_eps",
        "use_distributed_optimizer": "train.use_distributed_optimizer",
        "deterministic_mode": "deterministic",
        "virtual_pipeline_model_parallel_size": "nothing: the interleaved schedule is not built",
        "calculate_per_token_loss": "nothing: losses carry their own global denominators",
        "variable_seq_lengths": "nothing: micro-batches differ in length",
        "overlap_param_gather": "nothing: gradients and weights travel after the backward pass",
        "num_layers": "model (a Hugging Face folder sets the architecture)",
        "hidden_size": "model (a Hugging Face folder sets the architecture)",
        "ffn_hidden_size": "model (a Hugging Face folder sets the architecture)",
        "num_attention_heads": "model (a Hugging Face folder sets the architecture)",
        "num_query_groups": "model (a Hugging Face folder sets the architecture)",
        "kv_channels": "model (a Hugging Face folder sets the architecture)",
        "num_moe_experts": "model (a Hugging Face folder sets the architecture)",
    }
)
"""Megatron fields that rolegraph sets itself, with what to type instead."""


@dataclass
class MegatronModelConfig:
    """A model on a mesh of ranks: sizes of the mesh, micro-batches, and any other Megatron field."""

    node: ClassVar[str] = "train"
    """The config's node, as messages name it."""
    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"megatron": (TRANSFORMER_CONFIG,)})
    """Whose fields the keys of a free mapping are, to check them before anything starts."""
    at_least_one: ClassVar[tuple[str, ...]] = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "micro_batch_size",
        "max_tokens_per_micro_batch",
    )

    # Devices; one of ranks and gpus gives the other, the plan fills both.
    ranks: int | None = None
    gpus: int | None = None
    cpus: float | None = None
    """Cores a rank where the run has no GPU."""

    # The mesh. Data-parallel size is ranks / (tensor x pipeline x context).
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    """More than 1 needs Transformer Engine."""
    expert_model_parallel_size: int = 1
    """Experts spread over data-parallel (and tensor-parallel) ranks; more than 1 needs a mixture of experts."""
    sequence_parallel: bool | None = None
    """null: on where tensor_model_parallel_size is above 1."""

    # The model.
    model: str | ModelConfig | None = None
    """A Hugging Face folder or name, or a choice as in `model@train.model=smollm2_135m`; null: the run's policy."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU. Gradients and optimizer state are float32 either way."""

    # Micro-batches.
    micro_batch_size: int | None = None
    """Most rows in a micro-batch; null: no bound where max_tokens_per_micro_batch is given, else as many as keep about
    512 MiB until the backward, with room for 4 of the longest rows at least."""
    max_tokens_per_micro_batch: int | None = None
    """Most tokens in a micro-batch (padded ones count unless padding_free); a longer row is refused."""
    padding_free: bool | None = None
    """Rows of a micro-batch are packed end to end instead of padded to the longest; null: true, except with context
    parallelism."""
    share_prompts: bool | None = None
    """Packed rows that follow each other and have the same prompt (the samples of one group) compute it once: the same
    numbers from fewer tokens, except that a mixture of experts counts the prompt once in its load. null: true where
    rows are packed and Transformer Engine is not installed, whose attention does not have it."""

    seed: int | None = None
    """null: the run's."""

    megatron: dict[str, Any] = field(default_factory=dict)
    """Any other field of megatron-core's TransformerConfig (for training, or OptimizerConfig), by its own name."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, self.node)

    @property
    def uses_sequence_parallel(self) -> bool:
        """`sequence_parallel` with its default filled in."""
        if self.sequence_parallel is None:
            return self.tensor_model_parallel_size > 1
        return self.sequence_parallel

    @property
    def uses_padding_free(self) -> bool:
        """`padding_free` with its default filled in."""
        if self.padding_free is None:
            return self.context_parallel_size == 1
        return self.padding_free

    @property
    def wants_shared_prompts(self) -> bool:
        """`share_prompts` with its default filled in, as far as it goes without looking at the installation."""
        return self.uses_padding_free if self.share_prompts is None else self.share_prompts

    @property
    def rows_per_micro_batch(self) -> int | None:
        """`micro_batch_size` with its default filled in, for rows of the longest length; null is no bound on rows."""
        if self.micro_batch_size is None and self.max_tokens_per_micro_batch is None:
            return DEFAULT_MICRO_BATCH_ROWS
        return self.micro_batch_size

    def problems(self) -> list[str]:
        """What is wrong with these values, each naming its key; empty when all is well."""
        return [*self._out_of_range(), *self._conflicts(), *self._owned_fields()]

    def _out_of_range(self) -> list[str]:
        return [
            f"{self.node}.{name}={getattr(self, name)} must be 1 or more"
            for name in self.at_least_one
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]

    def _conflicts(self) -> list[str]:
        found, node = [], self.node
        tensor = self.tensor_model_parallel_size
        if self.sequence_parallel and tensor == 1:
            found.append(f"{node}.sequence_parallel=true needs {node}.tensor_model_parallel_size above 1")
        if self.uses_padding_free and tensor > 1 and not self.uses_sequence_parallel:
            found.append(
                f"{node}.padding_free with tensor parallelism asks for sequence_parallel: "
                f"drop {node}.sequence_parallel=false or set {node}.padding_free=false"
            )
        if self.padding_free and self.context_parallel_size > 1:
            found.append(
                f"{node}.padding_free=true does not go with context parallelism: set {node}.padding_free=false"
            )
        if self.share_prompts and not self.uses_padding_free:
            found.append(f"{node}.share_prompts=true needs packed rows: drop it, or {node}.padding_free=false")
        return found

    def _owned_fields(self) -> list[str]:
        return [
            f"{self.node}.megatron.{name} is set by rolegraph; use {owner(name, self.node)}"
            for name in self.megatron
            if name in OWNED_FIELDS
        ]


def owner(field_name: str, node: str) -> str:
    """What to type instead of a Megatron field that rolegraph sets itself."""
    own = OWNED_FIELDS[field_name]
    return f"{node}.{own.removeprefix('train.')}" if own.startswith("train.") else own


@dataclass
class MegatronTrainConfig(TunerConfig, MegatronModelConfig):
    """What `train` takes: a model on a mesh, what of it is trained, and the optimizer."""

    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"megatron": (TRANSFORMER_CONFIG, OPTIMIZER_CONFIG)}
    )
    at_least_one: ClassVar[tuple[str, ...]] = (*MegatronModelConfig.at_least_one, "decay_steps")

    reference: Literal["initial"] | None = None
    """initial: keep the starting weights for `logprobs(reference=True)`: a second copy, or with adapters none, since
    they are the weights without them."""

    # The optimizer (AdamW) and its schedule.
    lr: float = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Step at which the schedule reaches min_lr; null: max_steps."""
    min_lr: float = 0.0
    weight_decay: float = 0.0
    """Of matrices; norms and biases have none."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""

    def _out_of_range(self) -> list[str]:
        found = super()._out_of_range()
        found += [
            f"train.{name}={getattr(self, name)} must not be negative"
            for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
            if getattr(self, name) < 0
        ]
        found += [
            f"train.{name}={getattr(self, name)} must lie in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        return found

    def _conflicts(self) -> list[str]:
        found = [*super()._conflicts(), *self.tuner_problems()]
        if self.min_lr > self.lr:
            found.append(f"train.min_lr={self.min_lr} is above train.lr={self.lr}")
        return found
