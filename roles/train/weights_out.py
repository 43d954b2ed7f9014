"""The policy's weights on their way out, under Hugging Face names: gathered, padding cut, tied heads once.

Adapters are merged into a weight on its way, in a copy of it, or go out alone (`adapters_out.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rolegraph.interfaces import TensorInfo
from roles.train.lora import ADAPTER_KEY, layers_of
from roles.train.model import Policy


@dataclass(frozen=True)
class _Entry:
    """One parameter of the whole model: which stage holds it, and the shape of a rank's shard."""

    stage: int
    local: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_parallel: bool
    partition_dim: int

    @property
    def expert(self) -> bool:
        return ".mlp.experts.linear_fc" in self.name

    def empty(self, device: torch.device | str) -> Tensor:
        """A shard's memory, with the attributes by which mbridge merges shards."""
        return self.mark(torch.empty(self.shape, dtype=self.dtype, device=device))

    def mark(self, tensor: Tensor) -> Tensor:
        tensor.tensor_model_parallel = self.tensor_parallel  # type: ignore[attr-defined]
        tensor.partition_dim = self.partition_dim  # type: ignore[attr-defined]
        return tensor


class WeightExport:
    """Walks all weights of a policy; made once, on every rank together."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._bridge = policy.bridge
        self._adapters = {f"{layer}.weight": adapter for layer, adapter in layers_of(policy.adapters).items()}
        self._params = {
            name: param for name, param in policy.model.named_parameters() if ADAPTER_KEY not in name.split(".")
        }
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._tensors = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        self._entries = self._all_entries()
        self.manifest = [
            TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for entry in self._entries
            for name, tensor in self._to_hf(entry, entry.empty("meta"), meta=True)
        ]
        """Every tensor of `tensors()`, in order."""

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each weight, whole; every rank has to walk it to the end.

        A tensor may be a view of a live weight: use it before asking for the next.
        """
        for entry in self._entries:
            yield from self._to_hf(entry, self._shard(entry))

    def _all_entries(self) -> list[_Entry]:
        names = self._bridge._weight_name_mapping_mcore_local_to_global(self._policy.model, consider_ep=False)
        mine = [
            _Entry(
                stage=self._stage,
                local=local,
                name=names[local],
                shape=tuple(param.shape),
                dtype=param.dtype,
                tensor_parallel=bool(getattr(param, "tensor_model_parallel", False)),
                partition_dim=int(getattr(param, "partition_dim", -1)),
            )
            for local, param in self._params.items()
        ]
        stages: list[list[_Entry]] = [mine]
        if self._stages.size() > 1:
            stages = [[] for _ in range(self._stages.size())]
            dist.all_gather_object(stages, mine, group=self._stages)
        # The last stage's copy of a tied embedding is the first stage's.
        return [
            entry
            for entries in stages
            for entry in entries
            if not (self._bridge.tied and entry.name == "output_layer.weight")
        ]

    def _shard(self, entry: _Entry) -> Tensor:
        """This rank's shard, from the stage that holds it."""
        if entry.stage == self._stage:
            tensor, adapter = self._params[entry.local].detach(), self._adapters.get(entry.local)
            tensor = entry.mark(tensor if adapter is None else adapter.merged(tensor))
        else:
            tensor = entry.empty(self._policy.device)
        if self._stages.size() > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(self._stages, entry.stage), group=self._stages)
        return tensor

    def _to_hf(self, entry: _Entry, shard: Tensor, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Gather shards, and cut the whole into the tensors Hugging Face has."""
        if entry.expert:
            for index, expert in enumerate(self._gather(shard, self._experts, meta)):
                yield from self._convert(self._expert_name(entry, index), expert)
            return
        whole = shard
        if entry.tensor_parallel and self._tensors.size() > 1:
            whole = self._bridge._weight_merge_across_tp(entry.name, self._gather(shard, self._tensors, meta), shard)
        yield from self._convert(entry.name, whole)

    def _expert_name(self, entry: _Entry, owner: int) -> str:
        """The global name of the expert that rank `owner` of the expert group has in this place."""
        prefix, local = entry.name.rsplit(".weight", 1)
        per_rank = self._bridge.config.num_moe_experts // self._experts.size()
        return f"{prefix}.weight{owner * per_rank + int(local)}"

    def _convert(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        names, tensors = self._bridge._weight_to_hf_format(name, whole)
        yield from zip(names, tensors, strict=True)

    def _gather(self, shard: Tensor, group: dist.ProcessGroup, meta: bool) -> list[Tensor]:
        if group.size() == 1 or meta:
            return [shard] * group.size()
        parts = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(parts, shard.contiguous(), group=group)
        return parts
