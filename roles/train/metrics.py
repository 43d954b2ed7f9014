"""Sums over micro-batches and data-parallel ranks: metrics of a loss, and small counts every rank must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.types import Reduce, Stat

Pair = tuple[float, float | None]
"""A metric's sum and weight; weight null: a maximum."""


def gather_counts(counts: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[ranks, len(counts)] float64 on the CPU: each rank's counts."""
    mine = torch.tensor(counts, dtype=torch.float64, device=device)
    if group.size() == 1:
        return mine.cpu()[None]
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts).cpu()


def reduce_over(group: dist.ProcessGroup) -> Reduce:
    """The reductions a loss's `prepare` is given, over the ranks of `group`."""
    if group.size() == 1:
        return Reduce()

    def reduced(op: dist.ReduceOp.RedOpType) -> object:
        def run(tensor: Tensor) -> Tensor:
            out = tensor.detach().clone()
            dist.all_reduce(out, op=op, group=group)
            return out

        return run

    def gather(tensor: Tensor) -> Tensor:
        sizes = gather_counts([tensor.numel()], group, tensor.device)[:, 0].long().tolist()
        # Equal lengths are all that a collective takes on every backend.
        mine = tensor.new_zeros(max(sizes))
        mine[: tensor.numel()] = tensor.detach()
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return Reduce(sum=reduced(dist.ReduceOp.SUM), max=reduced(dist.ReduceOp.MAX), gather=gather)  # type: ignore[arg-type]


def reduce_stats(
    micro_batches: Iterable[Mapping[str, Stat]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """One value a metric: sums over weights, or the maximum; 0 where nothing was counted.

    Ranks may differ in the names they have: one without rows has none.
    """
    mine = _local(micro_batches)
    gathered: list[dict[str, Pair]] = [mine]
    if group.size() > 1:
        gathered = [{} for _ in range(group.size())]
        dist.all_gather_object(gathered, mine, group=group)
    return {name: _finish(pair) for name, pair in _merge(gathered).items()}


def _local(micro_batches: Iterable[Mapping[str, Stat]]) -> dict[str, Pair]:
    """All micro-batches of this rank, fetched from the device in one go."""
    stats = [(name, stat) for stats in micro_batches for name, stat in stats.items()]
    if not stats:
        return {}
    numbers: list[float] = torch.stack(
        [
            torch.as_tensor(part, dtype=torch.float64).reshape(()).to(stats[0][1].value.device)
            for _, stat in stats
            for part in (stat.value, 0.0 if stat.weight is None else stat.weight)
        ]
    ).tolist()
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    named = [
        {name: (value, None if stat.weight is None else weight)}
        for (name, stat), (value, weight) in zip(stats, pairs, strict=True)
    ]
    return _merge(named)


def _merge(parts: Iterable[Mapping[str, Pair]]) -> dict[str, Pair]:
    merged: dict[str, Pair] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            if name not in merged:
                merged[name] = (value, weight)
                continue
            before, weight_before = merged[name]
            if weight is None or weight_before is None:
                merged[name] = (max(before, value), None)
            else:
                merged[name] = (before + value, weight_before + weight)
    return merged


def _finish(pair: Pair) -> float:
    value, weight = pair
    if weight is None:
        return value
    return value / weight if weight else 0.0
