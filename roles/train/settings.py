"""What Megatron is told: fields of its configs from those of a role; and what a model or installation rules out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rolegraph.errors import ConfigError
from rolegraph.role import RoleContext
from roles.train import bridge as bridges
from roles.train.config import MegatronModelConfig


def seed_of(config: MegatronModelConfig, context: RoleContext) -> int:
    """The role's own seed, or the run's."""
    return config.seed if config.seed is not None else context.seed


def split_fields(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort `train.megatron.*` into fields of TransformerConfig and of OptimizerConfig (one may be of both).

    Raises ConfigError for a name that neither has, with the nearest one they do.
    """
    transformer = {field.name for field in dataclasses.fields(TransformerConfig)}
    optimizer = {field.name for field in dataclasses.fields(OptimizerConfig)}
    for name in given:
        if name not in transformer | optimizer:
            near = difflib.get_close_matches(name, sorted(transformer | optimizer), n=1, cutoff=0.0)
            raise ConfigError(
                f"train.megatron.{name} is no field of megatron-core's TransformerConfig or OptimizerConfig; "
                f"the nearest is {near[0]}"
            )
    values = {name: _value(name, value) for name, value in given.items()}
    return (
        {name: value for name, value in values.items() if name in transformer},
        {name: value for name, value in values.items() if name in optimizer},
    )


def _value(name: str, value: Any) -> Any:
    if not (name.endswith("dtype") and isinstance(value, str)):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"train.megatron.{name}={value} is no torch dtype; write for example bfloat16")
    return dtype


def check_model(config: MegatronModelConfig, hf_config: Any, experts: bool) -> None:
    """Refuse what this model or installation cannot do, by the names of the config's keys."""
    found, node = config.problems(), config.node
    if config.context_parallel_size > 1 and not bridges.HAVE_TE:
        found.append(
            f"{node}.context_parallel_size={config.context_parallel_size} needs Transformer Engine, which is not "
            "installed: megatron-core's context-parallel attention exists there only; set it to 1"
        )
    if config.share_prompts and bridges.HAVE_TE:
        found.append(
            f"{node}.share_prompts=true is for installations without Transformer Engine, whose attention has no "
            "prompts that several responses see: set it to null"
        )
    has_adapters = getattr(config, "adapter", None) is not None
    if has_adapters and config.megatron.get("use_transformer_engine_op_fuser"):
        found.append(
            f"{node}.megatron.use_transformer_engine_op_fuser=true computes MLPs past the modules that adapters are "
            "beside: remove it"
        )
    if experts and has_adapters:
        found.append(
            f"{node}.tuner_type=lora: {hf_config.model_type} has experts, which have no adapters here: set "
            f"{node}.tuner_type=full, or choose a dense model"
        )
    expert_parallel = config.expert_model_parallel_size
    if expert_parallel > 1 and not experts:
        found.append(f"{node}.expert_model_parallel_size={expert_parallel}, but {hf_config.model_type} has no experts")
    divisible = [
        ("num_attention_heads", "tensor_model_parallel_size"),
        ("num_key_value_heads", "tensor_model_parallel_size"),
        ("num_hidden_layers", "pipeline_model_parallel_size"),
    ]
    if experts:
        divisible.append(("num_experts", "expert_model_parallel_size"))
    for have, key in divisible:
        count, size = getattr(hf_config, have), getattr(config, key)
        if count % size:
            found.append(f"the model's {have}={count} does not divide by {node}.{key}={size}")
    if found:
        raise ConfigError("; ".join(found))


def dtype_of(config: MegatronModelConfig, context: RoleContext) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if context.device == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def transformer_settings(config: MegatronModelConfig, context: RoleContext, dtype: torch.dtype) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "sequence_parallel": config.uses_sequence_parallel,
        "calculate_per_token_loss": True,
        "autocast_dtype": dtype,
        # Every weight is loaded from the checkpoint; with initialisation off altogether, Megatron would not mark which
        # weights are sharded.
        "use_cpu_initialization": False,
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _keep),
        "deterministic_mode": context.deterministic and context.device == "cuda",
    }
    if context.device == "cpu":
        # The shim's gradient matmul; the other fusions are CUDA kernels.
        settings["gradient_accumulation_fusion"] = True
    if not bridges.HAVE_TE:
        settings |= {
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
        }
    return settings


def _keep(weight: Tensor) -> Tensor:
    """An initialisation that does nothing."""
    return weight
