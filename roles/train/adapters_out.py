"""The matrices of a policy's adapters on their way out, each whole, under PEFT's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rolegraph.values import TensorInfo
from roles.train.adapter import Side, tensor_name
from roles.train.lora import Adapters
from roles.train.model import Policy


@dataclass(frozen=True)
class _Entry:
    """One matrix: which stage holds it, and the shape of a rank's part of it."""

    stage: int
    module: str
    side: Side
    shape: tuple[int, ...]
    dtype: torch.dtype
    spread: int | None
    """The dimension along which tensor-parallel ranks share it."""


class AdapterMatrices:
    """Walks all matrices of the adapters; made once, on every rank together."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy = policy
        self.info = adapters.info
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._tensors = parallel_state.get_tensor_model_parallel_group()
        self._params = {(module, side): param for module, side, param, _ in adapters.matrices()}
        self._entries = self._all_entries(adapters)
        self.manifest = [
            TensorInfo(tensor_name(e.module, e.side), self._whole_shape(e), str(e.dtype).removeprefix("torch."))
            for e in self._entries
        ]
        """Every tensor of `tensors()`, in order."""

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each matrix, whole; every rank has to walk it to the end, and uses one before the next."""
        for entry in self._entries:
            yield tensor_name(entry.module, entry.side), self._whole(entry)

    def _all_entries(self, adapters: Adapters) -> list[_Entry]:
        mine = [
            _Entry(self._stage, module, side, tuple(param.shape), param.dtype, spread)
            for module, side, param, spread in adapters.matrices()
        ]
        if self._stages.size() == 1:
            return mine
        stages: list[list[_Entry]] = [[] for _ in range(self._stages.size())]
        dist.all_gather_object(stages, mine, group=self._stages)
        return [entry for entries in stages for entry in entries]

    def _whole_shape(self, entry: _Entry) -> tuple[int, ...]:
        return tuple(
            size * self._tensors.size() if dim == entry.spread else size for dim, size in enumerate(entry.shape)
        )

    def _whole(self, entry: _Entry) -> Tensor:
        if entry.stage == self._stage:
            part = self._params[entry.module, entry.side].detach()
        else:
            part = torch.empty(entry.shape, dtype=entry.dtype, device=self._policy.device)
        if self._stages.size() > 1:
            dist.broadcast(part, src=dist.get_global_rank(self._stages, entry.stage), group=self._stages)
        if entry.spread is None or self._tensors.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self._tensors.size())]
        dist.all_gather(parts, part.contiguous(), group=self._tensors)
        return torch.cat(parts, dim=entry.spread)
