"""Context parallelism: each rank of a group computes two chunks of every sequence.

Megatron cuts a sequence into 2 x ranks chunks and gives rank r the chunks r and 2 x ranks - 1 - r, which balances
causal attention. The attention itself is Transformer Engine's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def split(tokens: Tensor, rank: int, ranks: int) -> Tensor:
    """[batch, seq] to this rank's [batch, seq / ranks]; seq divides by 2 x ranks."""
    if ranks == 1:
        return tokens
    chunks = tokens.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)


def join(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [seq / ranks, batch, hidden] to the whole [seq, batch, hidden], the same on every rank.

    The backward adds up the gradients of all ranks: each of them computes the whole loss, so it has to take 1 / ranks
    of it.
    """
    ranks = group.size()
    if ranks == 1:
        return hidden
    from torch.distributed.nn.functional import all_gather

    return merge(list(all_gather(hidden.contiguous(), group=group)))  # type: ignore[no-untyped-call]


def merge(parts: list[Tensor]) -> Tensor:
    """The parts of all ranks, [seq / ranks, ...] each, back in the order of the sequence."""
    halves = [part.chunk(2, dim=0) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=0)
