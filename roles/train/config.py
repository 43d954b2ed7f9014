"""Configs of the train roles, and the rules on them that need no engine to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from roles.train.options import RanksConfig, TrainConfig

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
class MegatronModelConfig(RanksConfig):
    """A model on a mesh of ranks: sizes of the mesh, micro-batches, and any other Megatron field."""

    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"megatron": (TRANSFORMER_CONFIG,)})
    """Whose fields the keys of a free mapping are, to check them before anything starts."""
    at_least_one: ClassVar[tuple[str, ...]] = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        *RanksConfig.at_least_one,
    )

    # The mesh. Data-parallel size is ranks / (tensor x pipeline x context).
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    """More than 1 needs Transformer Engine; rows are padded then."""
    expert_model_parallel_size: int = 1
    """Experts spread over data-parallel (and tensor-parallel) ranks; more than 1 needs a mixture of experts."""
    sequence_parallel: bool | None = None
    """null: on where tensor_model_parallel_size is above 1."""

    share_prompts: bool | None = None
    """Packed rows that follow each other and have the same prompt (the samples of one group) compute it once: the same
    numbers from fewer tokens, except that a mixture of experts counts the prompt once in its load. null: true where
    rows are packed and Transformer Engine is not installed, whose attention does not have it."""

    megatron: dict[str, Any] = field(default_factory=dict)
    """Any other field of megatron-core's TransformerConfig (for training, or OptimizerConfig), by its own name."""

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

    def problems(self) -> list[str]:
        """What is wrong with these values, each naming its key; empty when all is well."""
        return [*super().problems(), *self._owned_fields()]

    def _conflicts(self) -> list[str]:
        found, node = super()._conflicts(), self.node
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
class MegatronTrainConfig(MegatronModelConfig, TrainConfig):
    """What `train` takes on megatron-core: a model on a mesh, and the optimizer."""

    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"megatron": (TRANSFORMER_CONFIG, OPTIMIZER_CONFIG)}
    )

    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""


@dataclass
class HuggingFaceTrainConfig(TrainConfig):
    """What `train` takes on transformers: any causal model, its weights shared by all ranks (FSDP2).

    `padding_free`: null packs where flash-attention is used, which skips what lies between rows; other attention would
    compute it, and there rows are padded on the right, which causal attention never looks at.
    """

    lora_modules: ClassVar[Sequence[str] | None] = None

    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = None
    """As transformers calls it; null: flash_attention_2 where it is installed beside a GPU, else its own choice."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it needs."""
    reduce_each_micro_batch: bool = False
    """Ranks add up gradients after each micro-batch, and each keeps its share of them alone, instead of all until the
    last one: less memory (4 bytes a weight), more traffic."""

    @property
    def uses_padding_free(self) -> bool:
        """`padding_free` as far as it goes without looking at the installation."""
        return bool(self.padding_free)
