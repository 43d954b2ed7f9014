"""Builds the policy: process groups, Megatron's model and optimizer, weights from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rolegraph.interfaces import PolicyWeights
from rolegraph.role import RoleContext
from roles.train import process_group, shim
from roles.train.config import MegatronModelConfig, MegatronTrainConfig
from roles.train.kept import kept_weights

with shim.quick_import():
    from mbridge.core.safetensor_io import SafeTensorIO
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from roles.train import bridge as bridges
    from roles.train import lora
    from roles.train.lora import Adapters
    from roles.train.settings import check_model, dtype_of, seed_of, split_fields, transformer_settings

shim.install()

_log = logging.getLogger(__name__)


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose last stage ends with the final norm: hidden states [seq, batch, hidden], never logits.

    The head is applied to response positions only, by `linear_logprobs`.
    """

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        outputs = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if self.config.recompute_granularity is not None and torch.is_grad_enabled() and outputs[0] is not None:
            # Beside a frozen embedding nothing would tell the recomputed layers that they have a gradient.
            outputs[0].requires_grad_()
        packed: PackedSeqParams | None = kwargs.get("packed_seq_params")
        if packed is None or packed.qkv_format == "thd":
            return outputs
        # Our attention keeps packed sequences in one [tokens, 1, ...] axis: each token's embedding by its position.
        decoder_input, rotary, *rest = outputs
        return (decoder_input, rotary[position_ids[0]], *rest)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """[padded vocabulary / tp, hidden] the output weight; last stage only."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


@dataclasses.dataclass
class Model:
    """A model on this rank, as far as computing with it goes."""

    bridge: bridges.PolicyBridge
    model: PolicyModel
    runs: torch.nn.Module
    """What Megatron's schedule calls: the model, or what wraps it."""
    source: str
    """The Hugging Face folder it came from."""
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass
class Policy(Model):
    """The model under training on this rank, with all that belongs to it."""

    runs: DistributedDataParallel
    optimizer: MegatronOptimizer
    reference: dict[str, Tensor] | None = None
    """The second set of weights, by parameter name."""
    reference_moved: bool = False
    """Whether those are others than the ones of the start, which the Hugging Face folder has."""
    average: dict[str, Tensor] | None = None
    """A moving average of the weights, by parameter name; float32."""
    adapters: Adapters | None = None
    """Where they are what is trained. `reference` and `average` are then of them alone, and without a `reference` the
    model of the start is the one without adapters."""

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters of this rank that training changes, by name."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def save_reference(self) -> None:
        """Copy the weights of now."""
        if self.reference is None:
            self.reference = {name: torch.empty_like(param) for name, param in self.trained.items()}
        for name, param in self.trained.items():
            self.reference[name].copy_(param.detach())
        self.reference_moved = True

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """average = decay * average + (1 - decay) * weights; the first call begins with the weights of now."""
        weights = self.trained
        if self.average is None:
            self.average = {name: param.detach().float().clone() for name, param in weights.items()}
            return
        for name, kept in self.average.items():  # one by one: in bfloat16 the new weights are copied to float32
            kept.lerp_(weights[name].detach().float(), 1.0 - decay)

    @contextmanager
    def holding(self, weights: PolicyWeights) -> Iterator[None]:
        """Inside, the model computes with the weights of now, of the start, or their average.

        Raises RoleGraphError where those are not kept.
        """
        if weights == "initial" and self.adapters is not None and self.reference is None:
            with self.adapters.off():
                yield
            return
        kept = self._kept(weights)
        if kept is None:
            yield
            return
        current = {name: param.data for name, param in self.trained.items()}
        try:
            for name, param in self.trained.items():
                param.data = kept[name].to(param.dtype)
            yield
        finally:
            for name, param in self.trained.items():
                param.data = current[name]

    def head_of(self, weights: PolicyWeights) -> Tensor:
        """The output weight of one of the sets, without gradient, in the type the model computes in; last stage only.

        Raises RoleGraphError where that set is not kept.
        """
        head = self.model.head()
        if self.adapters is not None:
            return head.detach()  # no adapter is beside it
        kept = self._kept(weights)
        if kept is None:
            return head.detach()
        name = next(name for name, param in self.model.named_parameters() if param is head)
        return kept[name].to(head.dtype)

    def _kept(self, weights: PolicyWeights) -> dict[str, Tensor] | None:
        """Null for the weights of now."""
        return kept_weights(weights, self.reference, self.average)


def build_policy(config: MegatronTrainConfig, context: RoleContext) -> Policy:
    """A model to train: `build_model`, with gradients and an optimizer."""
    built = build_model(config, context)
    adapters = None
    if (info := config.adapter) is not None:
        adapters = lora.attach(built.model, built.bridge, info, seed_of(config, context))
    _, optimizer_fields = split_fields(config.megatron)
    ddp = _wrap(config, built.bridge.config, built.runs)
    optimizer = _build_optimizer(config, built.dtype, ddp, optimizer_fields)
    policy = Policy(built.bridge, built.model, ddp, built.source, built.dtype, built.device, optimizer)
    policy.adapters = adapters
    if config.reference == "initial" and adapters is None:
        policy.save_reference()
        policy.reference_moved = False
    return policy


def build_model(config: MegatronModelConfig, context: RoleContext) -> Model:
    """Join the process groups, build this rank's part of the model, and load its weights.

    Raises ConfigError where config, model and installation do not fit.
    """
    hf_config = AutoConfig.from_pretrained(config.folder)
    bridge_class = bridges.bridge_class(hf_config)
    check_model(config, hf_config, bridge_class.experts)
    device = torch.device("cuda", torch.cuda.current_device()) if context.device == "cuda" else torch.device("cpu")
    dtype = dtype_of(config, context)
    _log.info("computing in %s on %s", str(dtype).removeprefix("torch."), device)

    _join(config, context)
    tensor_parallel.model_parallel_cuda_manual_seed(seed_of(config, context))
    transformer_fields, _ = split_fields(config.megatron)
    divisor = config.tensor_model_parallel_size * (128 if context.device == "cuda" else 1)
    bridge = bridge_class(hf_config, dtype=dtype, make_vocab_size_divisible_by=divisor)
    settings = transformer_settings(config, context, dtype)
    if context.device == "cpu":
        # Experts weigh their activation by the router, which the shim's gated activation does not.
        settings["bias_activation_fusion"] = not bridge_class.experts
    bridge.set_extra_args(**settings | transformer_fields)
    model = _build_model(bridge, adapted=getattr(config, "adapter", None) is not None)
    load_weights(bridge, model, config.folder)
    model.to(device)
    runs = Float16Module(bridge.config, model) if bridge.config.bf16 else model
    return Model(bridge, model, runs, config.folder, dtype, device)


def _join(config: MegatronModelConfig, context: RoleContext) -> None:
    """Start torch's default process group and Megatron's groups in it."""
    process_group.join(context)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )


def leave() -> None:
    """Take down the process groups, so that the process can join others."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    process_group.leave()


def _build_model(bridge: bridges.PolicyBridge, *, adapted: bool) -> PolicyModel:
    model = PolicyModel(
        config=bridge.config,
        transformer_layer_spec=bridge.layer_spec(adapted=adapted),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **bridge.model_arguments(),
    )
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return model


@torch.no_grad()
def load_weights(bridge: bridges.PolicyBridge, model: PolicyModel, folder: str) -> None:
    """Fill this rank's parameters from a Hugging Face folder; each rank reads what it needs.

    Raises ValueError, naming them, where tensors are missing.
    """
    reader = SafeTensorIO(folder)
    names = bridge.global_names(model)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    sources = {local: bridge.hf_names(names[local]) for local, _ in model.named_parameters()}
    tensors = reader.load_some_hf_weight(sorted({name for group in sources.values() for name in group}))
    for local, param in model.named_parameters():
        whole = bridge._weight_to_mcore_format(names[local], [tensors[name] for name in sources[local]])
        if whole.shape == param.shape:
            param.copy_(whole)
        else:
            param.copy_(bridge._weight_split_across_tp(names[local], whole, param, size)[rank])


def _wrap(
    config: MegatronTrainConfig, transformer_config: TransformerConfig, module: torch.nn.Module
) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )
    ddp = DistributedDataParallel(transformer_config, settings, module)
    transformer_config.finalize_model_grads_func = _finalize
    return ddp


def _finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients, without its division by a token count: losses are divided already."""
    finalize_model_grads(model, None, **kwargs)


def _build_optimizer(
    config: MegatronTrainConfig, dtype: torch.dtype, ddp: DistributedDataParallel, fields: dict[str, Any]
) -> MegatronOptimizer:
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "clip_grad": config.clip_grad,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_eps": config.adam_eps,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.use_distributed_optimizer,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings | fields), [ddp], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # The scheduler that Megatron's own training loop has would set this.
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        if "fused" in group:
            # torch's AdamW: one pass over the weights instead of one an operation.
            group["fused"], group["foreach"] = True, False
    return optimizer
