"""Low-rank adapters of PEFT beside the linear layers of a model of transformers, which stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rolegraph.errors import ConfigError
from rolegraph.values import AdapterInfo, TensorInfo
from roles.train.adapter import Side, first_a, tensor_name

if TYPE_CHECKING:
    from roles.train.huggingface_model import HFPolicy

_log = logging.getLogger(__name__)

NAME = "default"
"""Of the one adapter, among those that PEFT could keep beside each other."""
SIDES: tuple[Side, Side] = ("A", "B")


def adapt(model: Any, asked: AdapterInfo, seed: int) -> AdapterInfo:
    """Put an adapter beside each module that is asked for; only adapters are trained. Returns what there is now.

    Raises ConfigError for modules that the model has not, that are no linear layers, or that are its head.
    """
    is_all = asked.targets == ("all-linear",)
    targets = all_linear(model) if is_all else list(asked.targets)
    config = LoraConfig(
        r=asked.rank,
        lora_alpha=asked.alpha,  # type: ignore[arg-type] # PEFT divides it, whatever number it is
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model, adapter_name=NAME)
    except ValueError as error:
        given = "all-linear" if is_all else targets
        raise ConfigError(f"train.lora_targets={given} does not fit {type(model).__name__}: {error}") from error
    found = dict(layers(model))
    for name, layer in found.items():
        if layer is model.get_output_embeddings():
            raise ConfigError(
                f"train.lora_targets: {name} makes the logits, and adapters here are for the layers before it: leave "
                "it out"
            )
        if not isinstance(layer, LoraLinear):
            raise ConfigError(
                f"train.lora_targets: {name} is {type(layer.get_base_layer()).__name__}, and adapters here are for "
                "linear layers: leave it out, and the names of what it holds"
            )
    if not is_all and (missing := [name for name in targets if name not in _last_parts(found)]):
        raise ConfigError(f"train.lora_targets names {', '.join(missing)}, which {type(model).__name__} does not have")
    for name, layer in found.items():
        a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        a.data = first_a(seed, name, *a.shape)
        b.data = torch.zeros(b.shape)
    for name, param in model.named_parameters():
        param.requires_grad = ".lora_" in name
    return AdapterInfo(asked.rank, asked.alpha, tuple(_last_parts(found)))


def all_linear(model: Any) -> list[str]:
    """The linear layers of a model, by name, but its head.

    Nor any of the blocks that hold experts, nor of their dense siblings: experts are tensors, no layers, and PEFT takes
    the names of those that are left there (gate_proj) for theirs.
    """
    modules = [(name, module) for name, module in model.named_modules() if module is not model.get_output_embeddings()]
    blocks = {name.split(".")[-2] for name, _ in modules if name.endswith(".experts")}
    if blocks:
        _log.info("no adapters in %s, where %s has experts", ", ".join(sorted(blocks)), type(model).__name__)
    return [
        name
        for name, module in modules
        if isinstance(module, nn.Linear | Conv1D) and blocks.isdisjoint(name.split("."))
    ]


def layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that have an adapter, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def without(model: Any) -> Iterator[None]:
    """Inside, the model computes without its adapters."""
    found = [layer for _, layer in layers(model)]
    for layer in found:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


def added(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """What whole matrices of an adapter add to the weight of their layer."""
    delta = layer.scaling[NAME] * (b.float() @ a.float())
    return delta.t() if layer.fan_in_fan_out else delta


def _last_parts(names: Any) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


class HFAdapters:
    """Walks all matrices of the adapters, under PEFT's names."""

    def __init__(self, policy: HFPolicy) -> None:
        assert policy.adapter is not None
        self._policy = policy
        self.info = policy.adapter
        dtype = str(policy.dtype).removeprefix("torch.")
        self.manifest = [TensorInfo(name, tuple(param.shape), dtype) for name, param in self._matrices()]
        """Every tensor of `tensors()`, in order."""

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each matrix, whole; every rank has to walk it to the end."""
        from roles.train.huggingface_model import whole

        for name, param in self._matrices():
            yield name, whole(param.detach()).to(self._policy.dtype)

    def _matrices(self) -> Iterator[tuple[str, Tensor]]:
        for module, layer in layers(self._policy.model):
            for side in SIDES:
                yield tensor_name(module, side), getattr(layer, f"lora_{side}")[NAME].weight
