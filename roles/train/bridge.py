"""mbridge for the models this role trains: architecture and weights of a Hugging Face folder, as Megatron has them.

mbridge's own bridges assume Transformer Engine. The mixin here builds the layer spec of the installation (Transformer
Engine, or plain modules with our attention), translates its parameter names, and reads rotary settings as transformers
5 writes them.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rolegraph.errors import ConfigError
from roles.train import fused
from roles.train.attention import SDPAttention

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that knows sequence parallelism, which Megatron's plain one refuses.

    The flag on the weight makes Megatron add up its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        if hidden.device.type == "cpu" and hidden.dtype == self.weight.dtype == torch.float32:
            return fused.rms_norm(hidden, self.weight, self.eps)
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class PolicyBridge(LLMBridge):  # type: ignore[misc]
    """What the bridges below share; mixed in before mbridge's class of the architecture."""

    experts = False

    def layer_spec(self, *, adapted: bool = False) -> Any:
        """The decoder's layers out of the modules this installation has.

        Adapters see what the matrix beside them sees: with `adapted`, no norm is inside the module of a matrix.
        """
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=HAVE_TE, normalization=self.config.normalization
        )
        if HAVE_TE:
            if adapted:
                _part_norms(spec)
            return spec
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = SDPAttention
            if self.config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        return spec

    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of GPTModel besides config, spec and stage; sets the padded vocabulary size."""
        divisor = self.make_vocab_size_divisible_by
        self.vocab_size = self.hf_config.vocab_size
        self.padded_vocab_size = -(-self.vocab_size // divisor) * divisor
        return {
            "vocab_size": self.padded_vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": self.tied,
            **_rope(self.hf_config),
        }

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(getattr(self.hf_config, "tie_word_embeddings", False))

    def global_names(self, model: torch.nn.Module) -> dict[str, str]:
        """Each parameter's name in the whole model, by its name in this rank's stage; experts counted globally."""
        names: dict[str, str] = self._weight_name_mapping_mcore_local_to_global(model)
        return names

    def hf_names(self, name: str) -> list[str]:
        """The Hugging Face tensors that a parameter, by its global name, is made of."""
        return self._weight_name_mapping_mcore_to_hf(name)

    def _adjust_mapping_for_shared_weights(self) -> None:
        # mbridge writes the tied head into the mapping of the class, where an untied model would find it later.
        mapping: dict[str, str] = super()._DIRECT_MAPPING
        self._DIRECT_MAPPING = dict(mapping)
        if self.tied:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        # Plain modules have norms of their own where Transformer Engine fuses them into the next linear layer.
        if name.endswith(".input_layernorm.weight"):
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        elif name.endswith(".pre_mlp_layernorm.weight") and not self.experts:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)
        return names


class QwenBridge2(PolicyBridge, Qwen2Bridge):  # type: ignore[misc]
    """Qwen2 and Qwen2.5."""


class QwenBridge3(PolicyBridge, Qwen3Bridge):  # type: ignore[misc]
    """Qwen3, dense."""


class LlamaBridge(PolicyBridge, LLaMABridge):  # type: ignore[misc]
    """Llama and its likes (SmolLM2)."""

    def _build_config(self) -> TransformerConfig:
        if getattr(self.hf_config, "mlp_bias", False):
            raise ConfigError("this Llama has mlp_bias=true, which the trainer does not build")
        return super()._build_config()


class QwenMoeBridge3(PolicyBridge, Qwen3MoEBridge):  # type: ignore[misc]
    """Qwen3 mixture of experts; its experts are modules of their own (no grouped matmul)."""

    experts = True

    def _build_config(self) -> TransformerConfig:
        self.extra_args.setdefault("moe_grouped_gemm", False)
        return super()._build_config()

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        offset = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank if consider_ep else 0
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        return {local: _grouped_expert_name(name, offset) for local, name in names.items()}


def _part_norms(spec: Any) -> None:
    """Transformer Engine's norms as modules of their own, before matrices without one."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    for layer in spec.layer_specs:
        submodules = layer.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = TENorm
        submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear


def _grouped_expert_name(name: str, offset: int) -> str:
    """`experts.local_experts.N.linear_fc1.weight` as mbridge calls it, `experts.linear_fc1.weightN`, N global."""

    def rename(match: re.Match[str]) -> str:
        return f"experts.{match[2]}.weight{int(match[1]) + offset}"

    return re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rename, name)


BRIDGES: dict[str, type[PolicyBridge]] = {
    "qwen2": QwenBridge2,
    "qwen3": QwenBridge3,
    "llama": LlamaBridge,
    "qwen3_moe": QwenMoeBridge3,
}


def bridge_class(hf_config: Any) -> type[PolicyBridge]:
    """The bridge of a Hugging Face config's model type; raises ConfigError naming the types there are."""
    if hf_config.model_type not in BRIDGES:
        raise ConfigError(
            f"the Megatron trainer has no model type {hf_config.model_type!r}; it has {', '.join(sorted(BRIDGES))}"
        )
    return BRIDGES[hf_config.model_type]


def _rope(hf_config: Any) -> dict[str, Any]:
    """GPTModel's rotary arguments; raises ConfigError for a kind of scaling Megatron does not have."""
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    base = parameters.get("rope_theta") or getattr(hf_config, "rope_theta", None) or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    arguments: dict[str, Any] = {"rotary_base": base}
    if share := parameters.get("partial_rotary_factor"):
        arguments["rotary_percent"] = share
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = parameters["factor"]
    elif kind == "llama3":
        # The other three numbers are constants of Megatron's code.
        known = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(parameters.get(name, value) != value for name, value in known.items()):
            raise ConfigError(f"llama3 rotary scaling is built for {known} only, the model has {parameters}")
        arguments |= {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
    elif kind != "default":
        raise ConfigError(f"rotary scaling {kind!r} is not built; use a model with default, linear or llama3")
    return arguments
