"""Low-rank adapters beside Megatron's linear layers, which stay as they are: their names, kernels and collectives.

One layer of Megatron's can be several modules of Hugging Face's (q, k and v; gate and up). Each has matrices of its
own, under its own name; computing puts them together into one pair. What travels between ranks is `rank` wide:

    column-parallel   A whole on every rank, B's rows spread as the weight's
    row-parallel      A's columns spread as the weight's, B whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rolegraph.values import AdapterInfo
from roles.train.adapter import Side, first_a
from roles.train.bridge import PolicyBridge

_ROW_PARALLEL = ("linear_proj", "linear_fc2")
_LINEAR = ("linear_qkv", "linear_fc1", *_ROW_PARALLEL)


ADAPTER_KEY = "adapter"
"""What the module of an adapter is called in the layer it belongs to, and so in the names of its parameters."""


@dataclass(frozen=True)
class Part:
    """A module of Hugging Face's within a linear layer of Megatron's."""

    module: str
    """Its whole name."""
    rows: int
    """Of this rank's weight: how many of each group belong to it."""

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.module.rpartition(".")[2]


class Adapter(nn.Module):
    """What is added to the output of one linear layer.

    `parts` are the layer's modules in the order of its rows, which repeats `groups` times (a query group's q, k and v).
    """

    def __init__(
        self, linear: nn.Module, parts: Sequence[Part], groups: int, info: AdapterInfo, *, row_parallel: bool
    ) -> None:
        super().__init__()
        config, weight = _config_of(linear), _weight_of(linear)
        self.parts, self.groups, self.row_parallel = parts, groups, row_parallel
        self.scale = info.alpha / info.rank
        self.active = True
        self._parallel = config.tensor_model_parallel_size > 1
        self._in_sequence = bool(config.sequence_parallel)
        self.adapted = [part for part in parts if part.name in info.targets]
        self.lora_A = nn.ParameterDict(
            {part.name: weight.new_empty(info.rank, weight.shape[1]) for part in self.adapted}
        )
        self.lora_B = nn.ParameterDict(
            {part.name: weight.new_zeros(groups * part.rows, info.rank) for part in self.adapted}
        )
        self._tell_megatron()

    def _tell_megatron(self) -> None:
        """Which matrices are shards, and which gradients are of a rank's tokens alone and have to be added up."""
        spread, whole = (self.lora_A, self.lora_B) if self.row_parallel else (self.lora_B, self.lora_A)
        for param in spread.values():
            tensor_parallel.set_tensor_model_parallel_attributes(param, True, self.spread_dim, 1)
        for param in whole.values():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
            param.sequence_parallel = self._in_sequence

    @property
    def spread_dim(self) -> int:
        """The dimension along which tensor-parallel ranks share A (row-parallel) or B (column-parallel)."""
        return 1 if self.row_parallel else 0

    def is_spread(self, side: Side) -> bool:
        """Whether tensor-parallel ranks hold shards of this side; else each holds all of it."""
        return (side == "A") == self.row_parallel

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """First values: A drawn as a whole, of which a rank takes its shard, and B zero."""
        for part in self.adapted:
            a = self.lora_A[part.name]
            ranks = parallel_state.get_tensor_model_parallel_world_size() if self.row_parallel else 1
            whole = first_a(seed, part.module, a.shape[0], a.shape[1] * ranks)
            rank = parallel_state.get_tensor_model_parallel_rank() if self.row_parallel else 0
            a.copy_(whole[:, rank * a.shape[1] : (rank + 1) * a.shape[1]])
            self.lora_B[part.name].zero_()

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """`output` [seq, batch, out] of the layer for `inputs` [seq, batch, in], with the adapter's part added."""
        if not self.active:
            return output
        low = self._between_ranks(F.linear(inputs, self._a()))
        added = torch.addmm(
            output.reshape(-1, output.shape[-1]), low.reshape(-1, low.shape[-1]), self._b().t(), alpha=self.scale
        )
        return added.view_as(output)

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's shard of W + alpha / rank B A, summed in float32, in the weight's type."""
        return torch.addmm(weight.float(), self._b().float(), self._a().float(), alpha=self.scale).to(weight.dtype)

    def _between_ranks(self, low: Tensor) -> Tensor:
        """All tokens on every rank of a column-parallel layer; sums over shards of the input in a row-parallel one."""
        if not self._parallel:
            return low
        if self.row_parallel:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._in_sequence
                else reduce_from_tensor_model_parallel_region
            )
            return reduce(low)
        if self._in_sequence:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(low)

    def _a(self) -> Tensor:
        """[modules x rank, in]: the A of every module, one below the other."""
        return torch.cat([self.lora_A[part.name] for part in self.adapted])

    def _b(self) -> Tensor:
        """[out, modules x rank]: the B of every module, in its rows of the layer and the columns of its A."""
        if len(self.parts) == 1:
            return self.lora_B[self.parts[0].name]
        some = self.lora_B[self.adapted[0].name]
        rank = some.shape[1]
        width, left = len(self.adapted) * rank, 0
        blocks = []
        for part in self.parts:
            if part not in self.adapted:
                blocks.append(some.new_zeros(self.groups, part.rows, width))
                continue
            own = self.lora_B[part.name].view(self.groups, part.rows, rank)
            blocks.append(F.pad(own, (left, width - left - rank)))
            left += rank
        return torch.cat(blocks, dim=1).flatten(0, 1)


class Adapters:
    """All adapters of a rank's part of the model, by the name of the layer they belong to."""

    def __init__(self, info: AdapterInfo, layers: dict[str, Adapter]) -> None:
        self.info = info
        self.layers = layers

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the one without adapters."""
        for adapter in self.layers.values():
            adapter.active = False
        try:
            yield
        finally:
            for adapter in self.layers.values():
                adapter.active = True

    def matrices(self) -> Iterator[tuple[str, Side, nn.Parameter, int | None]]:
        """Each matrix with its module's whole name and its side, and the dimension along which ranks share it."""
        for adapter in self.layers.values():
            for part in adapter.adapted:
                sides: tuple[tuple[Side, nn.ParameterDict], ...] = (("A", adapter.lora_A), ("B", adapter.lora_B))
                for side, params in sides:
                    yield part.module, side, params[part.name], adapter.spread_dim if adapter.is_spread(side) else None


def layers_of(adapters: Adapters | None) -> dict[str, Adapter]:
    """The adapters by layer; none where all weights are trained."""
    return {} if adapters is None else adapters.layers


def attach(model: nn.Module, bridge: PolicyBridge, info: AdapterInfo, seed: int) -> Adapters:
    """Freeze the model, and put adapters beside the layers whose modules `info` names."""
    model.requires_grad_(False)
    names = bridge.global_names(model)
    layers: dict[str, Adapter] = {}
    for path, linear in list(model.named_modules()):
        kind = path.rpartition(".")[2]
        if kind not in _LINEAR:
            continue
        modules = [name.removesuffix(".weight") for name in bridge.hf_names(names[f"{path}.weight"])]
        groups, rows = _layout(kind, linear, bridge.config)
        parts = [Part(module, count) for module, count in zip(modules, rows, strict=True)]
        if any(part.name in info.targets for part in parts):
            adapter = Adapter(linear, parts, groups, info, row_parallel=kind in _ROW_PARALLEL)
            adapter.reset(seed)
            linear.add_module(ADAPTER_KEY, adapter)
            linear.register_forward_hook(_add)
            layers[path] = adapter
    return Adapters(info, layers)


def _layout(kind: str, linear: nn.Module, config: TransformerConfig) -> tuple[int, list[int]]:
    """How a rank's rows of a layer repeat, and how many of each group belong to each of its modules."""
    if kind == "linear_qkv":
        groups = config.num_query_groups // config.tensor_model_parallel_size
        heads = config.num_attention_heads // config.num_query_groups
        return groups, [heads * config.kv_channels, config.kv_channels, config.kv_channels]
    rows = len(_weight_of(linear))
    return 1, [rows // 2] * 2 if kind == "linear_fc1" else [rows]


def _add(linear: nn.Module, inputs: tuple[Any, ...], result: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
    output, bias = result
    adapter = linear.adapter
    assert isinstance(adapter, Adapter)
    return adapter(inputs[0], output), bias


def _weight_of(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight


def _config_of(linear: nn.Module) -> TransformerConfig:
    config: Any = linear.config
    return config
