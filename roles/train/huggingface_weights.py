"""The weights of a sharded model of transformers on their way out: gathered one at a time, under the names on disk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rolegraph.errors import ConfigError
from rolegraph.interfaces import TensorInfo
from roles.train import huggingface_lora as lora
from roles.train.huggingface_model import HFPolicy, whole


class HFExport:
    """Walks all weights of a policy, tied ones once; every rank has to walk along."""

    def __init__(self, policy: HFPolicy) -> None:
        self._policy = policy
        self.manifest = self._manifest()
        """Every tensor of `tensors()`, in order."""

    def _manifest(self) -> list[TensorInfo]:
        """Raises ConfigError for a model whose loading computes with its weights, so that they have no way back."""
        model = type(self._policy.model).__name__
        try:
            found = [
                TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for own, param in self._weights()
                for name, tensor in self._on_disk(
                    own, torch.empty(param.shape, dtype=self._dtype(param), device="meta")
                )
            ]
        except Exception as error:
            raise ConfigError(
                f"train=huggingface: the weights of {model} are not as its folder has them: {error}"
            ) from error
        names = [info.name for info in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"train=huggingface: {min(twice)} of its folder is made of several weights of {model}")
        return found

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each weight, whole, in the type the model computes in.

        Adapters are merged into them. A tensor may be a view of a live weight: use it before asking for the next.
        """
        adapted = {f"{name}.weight": layer for name, layer in lora.layers(self._policy.model)}
        for name, param in self._weights():
            tensor = whole(param.detach())
            if layer := adapted.get(name):
                a, b = (whole(getattr(layer, f"lora_{side}")[lora.NAME].weight.detach()) for side in lora.SIDES)
                tensor = tensor.float() + lora.added(layer, a, b)
            yield from self._on_disk(name, tensor.to(self._dtype(param)))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own weights, and buffers that are saved, under the names they have without adapters."""
        model = self._policy.model
        saved = model.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
        for name, tensor in (*model.named_parameters(), *buffers):
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), tensor

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        """Of a weight on its way out; buffers keep theirs."""
        return self._policy.dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

    def _on_disk(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A weight as checkpoints hold it: transformers joins some, as the experts of a layer, when it loads them."""
        yield from revert_weight_conversion(self._policy.model, {name: tensor}).items()
