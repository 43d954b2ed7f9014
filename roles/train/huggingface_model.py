"""A causal model of transformers whose weights ranks share (FSDP2), and all that belongs to training it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from rolegraph.errors import ConfigError
from rolegraph.interfaces import AdapterInfo, PolicyWeights
from rolegraph.role import RoleContext
from roles.frozen import ONE_LOADS
from roles.logits import HeadRule, head_rule
from roles.train import huggingface_lora as lora
from roles.train import process_group
from roles.train.config import HuggingFaceTrainConfig
from roles.train.kept import kept_weights

_log = logging.getLogger(__name__)


class Root(nn.Module):
    """The outermost sharded module: inside its forward the embeddings, the last norm and the head are whole.

    So the head is applied there, to response positions alone, and its gradient leaves with those of the embeddings.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Any], finish: Callable[[Tensor], Any]) -> Any:
        """What `finish` makes of the states after the last norm, [batch, seq, hidden]."""
        decoder: Any = self.causal.get_decoder()
        return finish(decoder(**inputs).last_hidden_state)

    @property
    def causal(self) -> Any:
        """The model of transformers, without what adapts it."""
        return self.model


@dataclass
class HFPolicy:
    """The model under training on this rank: its shard of each weight, as a DTensor cut along the first dimension."""

    root: Root
    source: str
    """The Hugging Face folder it came from."""
    dtype: torch.dtype
    """What the model computes in; the weights that are trained are float32."""
    device: torch.device
    rule: HeadRule
    packed: bool
    """Rows of a micro-batch are packed."""
    settings: Any
    """The configuration of transformers as it came with the model."""
    optimizer: torch.optim.AdamW
    adapter: AdapterInfo | None = None
    """Where adapters are trained, their sizes."""
    reference: dict[str, Tensor] | None = None
    """This rank's shards of the second set of weights, by parameter name."""
    reference_moved: bool = False
    """Whether it is another than that of the start."""
    average: dict[str, Tensor] | None = None
    """The same of the moving average of the weights."""

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.root.causal

    def shards(self) -> dict[str, Tensor]:
        """This rank's part of each weight under training, by parameter name; tied ones once."""
        return {name: local(param) for name, param in self.trained.items()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The weights under training by name; tied ones once."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def copies(self) -> dict[str, Tensor]:
        """Copies of this rank's shards."""
        return {name: shard.detach().clone() for name, shard in self.shards().items()}

    def save_reference(self) -> None:
        """Copy the weights of now, into the memory of those before."""
        if self.reference is None:
            self.reference = self.copies()
        for name, shard in self.shards().items():
            self.reference[name].copy_(shard.detach())
        self.reference_moved = True

    def initial(self) -> dict[str, Tensor] | None:
        """This rank's shards of the weights of the start, read again; null for a model without its adapters."""
        if self.adapter is not None:
            return None
        with ONE_LOADS:
            found = AutoModelForCausalLM.from_pretrained(self.source, dtype="auto")
        params = dict(self.model.named_parameters())
        return {
            name: part(param.detach(), params[name]).to(self.device, torch.float32)
            for name, param in found.named_parameters()
        }

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """average = decay * average + (1 - decay) * weights; the first call begins with the weights of now."""
        if self.average is None:
            self.average = self.copies()
            return
        shards = self.shards()
        torch._foreach_lerp_(list(self.average.values()), [shards[name] for name in self.average], 1.0 - decay)

    @contextmanager
    def holding(self, weights: PolicyWeights) -> Iterator[None]:
        """Inside, the model computes with the weights of now, of the start, or their average.

        Raises RoleGraphError where those are not kept.
        """
        if self._is_bare(weights):
            with lora.without(self.model):
                yield
            return
        kept = self._kept(weights)
        if kept is None:
            yield
            return
        try:
            self._swap(kept)
            yield
        finally:
            self._swap(kept)

    def head_of(self, weights: PolicyWeights) -> tuple[Tensor, Tensor | None]:
        """The whole output weight of a set that is kept, and its bias if it has one; all ranks gather them.

        In the type the model computes in. Raises RoleGraphError where that set is not kept.
        """
        kept = None if self._is_bare(weights) else self._kept(weights)
        names = {id(param): name for name, param in self.trained.items()}

        def gathered(param: Tensor) -> Tensor:
            name = names.get(id(param))
            found = param if kept is None or name is None else like(param, kept[name])
            return whole(found).detach().to(self.dtype)

        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return gathered(head.weight), None if bias is None else gathered(bias)

    def reshard(self) -> None:
        """Let go of gathered weights, which a change of the shards would leave as they were."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _swap(self, kept: dict[str, Tensor]) -> None:
        """Exchange contents: FSDP holds views of the shards, so they stay where they are."""
        self.reshard()
        for name, shard in self.shards().items():
            before = shard.clone()
            shard.copy_(kept[name])
            kept[name].copy_(before)

    def _is_bare(self, weights: PolicyWeights) -> bool:
        """Whether these are the weights without adapters, which need no copy."""
        return weights == "initial" and self.adapter is not None and self.reference is None

    def _kept(self, weights: PolicyWeights) -> dict[str, Tensor] | None:
        """Null for the weights of now."""
        return kept_weights(weights, self.reference, self.average)


def held(policy: HFPolicy) -> dict[str, Iterable[Tensor]]:
    """The tensors that a rank holds between two steps, by the names under which they move."""
    kept = [*(policy.reference or {}).values(), *(policy.average or {}).values()]
    states = [value for state in policy.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "model": [*map(local, policy.root.parameters()), *policy.root.buffers(), *kept],
        "gradients": [local(param.grad) for param in policy.root.parameters() if param.grad is not None],
        "optimizer": [local(state) for state in states],
    }


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered by all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, sharded: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as `sharded` is."""
    if not isinstance(sharded, DTensor):
        return tensor
    rank, parts = dist.get_rank(), tensor.chunk(dist.get_world_size())
    return parts[rank] if rank < len(parts) else tensor[:0]


def like(sharded: Tensor, shard: Tensor) -> Tensor:
    """This rank's `shard` of a tensor that is cut as `sharded` is."""
    if not isinstance(sharded, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def build_policy(config: HuggingFaceTrainConfig, context: RoleContext) -> HFPolicy:
    """Join the process group, load the model, and shard it.

    Raises ConfigError where config, model and installation do not fit.
    """
    if found := config.problems():
        raise ConfigError("; ".join(found))
    on_gpu = context.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = {"auto": torch.bfloat16 if on_gpu else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
    _log.info("computing in %s on %s", str(dtype).removeprefix("torch."), device)
    process_group.join(context)
    settings = AutoConfig.from_pretrained(config.folder)
    model = _load(config, on_gpu)
    adapter = None
    if config.adapter is not None:
        seed = config.seed if config.seed is not None else context.seed
        adapter = lora.adapt(model, config.adapter, seed)
        for param in model.parameters():
            param.data = param.data.to(torch.float32 if param.requires_grad else dtype)
    root = _shard(Root(model), dtype, device)
    policy = HFPolicy(
        root=root,
        source=config.folder,
        dtype=dtype,
        device=device,
        rule=head_rule(model),
        packed=_packs(config, model),
        settings=settings,
        optimizer=_optimizer(config, model),
        adapter=adapter,
    )
    if config.reference == "initial" and adapter is None:
        policy.reference = policy.copies()
    return policy


def _load(config: HuggingFaceTrainConfig, on_gpu: bool) -> Any:
    """The whole model in the type of the checkpoint; nothing in it draws random numbers.

    Its weights are mapped from their files, whose pages the ranks of a host share, until each has cut its part; copies
    are only what transformers has to convert, as experts that a checkpoint keeps one by one.
    """
    settings = AutoConfig.from_pretrained(config.folder)
    without_dropout(settings)
    attention = config.attention
    if attention is None and on_gpu and is_flash_attn_2_available():
        attention = "flash_attention_2"
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with ONE_LOADS:
            model = AutoModelForCausalLM.from_pretrained(config.folder, config=settings, dtype="auto", **chosen)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"train=huggingface cannot load {config.folder}: {error}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(model).__name__} has no gradient checkpointing: set train.gradient_checkpointing=false"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def without_dropout(settings: Any) -> None:
    """Set all its rates to 0, of nested configurations too: a ratio of two passes would tell of the noise."""
    for name, value in list(vars(settings).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(settings, name, 0.0)


def _packs(config: HuggingFaceTrainConfig, model: Any) -> bool:
    """Whether rows are packed: by default where attention knows where each ends, and skips what lies between."""
    positions = _takes(model, "position_ids")
    if config.padding_free and not positions:
        raise ConfigError(
            f"train.padding_free=true: {type(model).__name__} takes no positions, by which packed rows are told apart: "
            "set it to false"
        )
    if config.padding_free is not None:
        return config.padding_free
    return positions and str(model.config._attn_implementation).startswith("flash_attention")


def _shard(root: Root, dtype: torch.dtype, device: torch.device) -> Root:
    """Cut every layer, and what is outside of the layers, over all ranks; trained weights become float32."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    layers = list(_layers(root.causal))
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        # Losses are shares of a global sum, so gradients are added up, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # An expert that no token of a rank went to still has to reach the reduction.
    root.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    if any(param.requires_grad and param.dtype != torch.float32 for param in root.parameters()):
        root.float()
    return root


def _layers(model: Any) -> Iterator[Any]:
    """The modules that transformers itself would not spread over devices: decoder layers."""
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = max(lists, key=len, default=[])
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return (module for module in found if id(module) not in inner)


def _optimizer(config: HuggingFaceTrainConfig, model: nn.Module) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [param for name, param in trained if param.dim() > 1 and not name.endswith("bias")]
    others = [param for name, param in trained if param.dim() <= 1 or name.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def takes_cache(model: Any) -> bool:
    """Whether the decoder has a key-value cache to be switched off."""
    return _takes(model, "use_cache")


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.get_decoder().forward).parameters
