"""The weights of a sharded model of transformers on their way out: gathered one at a time, under the names on disk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rolegraph.interfaces import TensorInfo
from roles.train.huggingface_model import HFPolicy, whole


class HFExport:
    """Walks all weights of a policy, tied ones once; every rank has to walk along."""

    def __init__(self, policy: HFPolicy) -> None:
        self._policy = policy
        self.manifest = [
            TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for local_name, param in policy.model.named_parameters()
            for name, tensor in self._on_disk(local_name, torch.empty(param.shape, dtype=policy.dtype, device="meta"))
        ]
        """Every tensor of `tensors()`, in order."""

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each weight, whole, in the type the model computes in.

        A tensor may be a view of a live weight: use it before asking for the next.
        """
        for name, param in self._policy.model.named_parameters():
            yield from self._on_disk(name, whole(param.detach()).to(self._policy.dtype))

    def _on_disk(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A weight as checkpoints hold it: transformers joins some, as the experts of a layer, when it loads them."""
        yield from revert_weight_conversion(self._policy.model, {name: tensor}).items()
