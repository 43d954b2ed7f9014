"""From logits to what a teacher tells: logprobs of the response tokens, and the likeliest tokens of each position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.heads import Head
from rolegraph.losses.projection import operands, precision, project

CHUNK_BYTES = 256 * 2**20
"""Logits held at a time."""


@dataclass(frozen=True)
class TokenScores:
    """What a teacher thinks of some response tokens; everything is [tokens] or [tokens, ...]."""

    token_logprobs: Tensor
    """[tokens] float32, natural log, of the response tokens."""
    ids: Tensor | None = None
    """[tokens, K] int32, the likeliest tokens, likeliest first."""
    logprobs: Tensor | None = None
    """[tokens, K] float32, theirs."""
    hidden: Tensor | None = None
    """[tokens, hidden] the states after the final norm."""

    def cpu(self) -> TokenScores:
        """The same in host memory."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.cpu()

        return TokenScores(self.token_logprobs.cpu(), move(self.ids), move(self.logprobs), move(self.hidden))


@dataclass(frozen=True)
class Shard:
    """Which columns of the vocabulary this rank's logits are, and who has the others."""

    columns: int
    """Columns of this rank that are tokens: those after them are padding."""
    first: int = 0
    """The token of this rank's first column."""
    group: dist.ProcessGroup | None = None


def head_logits(head: Head, states: Tensor) -> Tensor:
    """[tokens, rows of the head] in float32, of states [tokens, h]; without gradient."""
    states, matrix = operands(states, head.weight)
    out = states.new_empty(len(states), len(matrix), dtype=precision(states))
    logits = project(states, matrix, out, scale=head.scale, bias=head.bias)
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


@torch.no_grad()
def score_tokens(
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    labels: Tensor,
    shard: Shard,
    *,
    topk: int = 0,
    keep_hidden: bool = False,
    temperature: float = 1.0,
) -> TokenScores:
    """Score response tokens from the hidden states [tokens, h] that predict them; `labels` [tokens] are their ids.

    `logits` gives [some tokens, columns] of this rank's part of the vocabulary; it is called for a few tokens at a
    time, so that the logits of all are never held. Every rank of the shard's group gets the whole result.
    """
    step = max(1, CHUNK_BYTES // (4 * max(shard.columns, 1)))
    parts = [
        _score(logits(hidden[start : start + step]), labels[start : start + step], shard, topk, temperature)
        for start in range(0, len(hidden), step)
    ]
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        nothing = hidden.new_zeros((0, topk))
        ids, values = (nothing.to(torch.int32), nothing.to(torch.float32)) if topk else (None, None)
        return TokenScores(empty, ids, values, hidden if keep_hidden else None)
    tokens, ids_of, values_of = zip(*parts, strict=True)
    return TokenScores(
        torch.cat(tokens),
        torch.cat(ids_of) if topk else None,
        torch.cat(values_of) if topk else None,
        hidden if keep_hidden else None,
    )


def _score(logits: Tensor, labels: Tensor, shard: Shard, topk: int, temperature: float) -> tuple[Tensor, ...]:
    logits = logits[:, : shard.columns].float()
    if temperature != 1.0:
        logits = logits / temperature
    total = torch.logsumexp(logits, dim=-1) if shard.columns else logits.new_full((len(logits),), -torch.inf)
    own = (labels >= shard.first) & (labels < shard.first + shard.columns)
    picked = torch.zeros_like(total)
    if shard.columns:
        columns = (labels - shard.first).clamp(0, shard.columns - 1)
        picked = torch.where(own, logits.gather(1, columns[:, None])[:, 0], 0.0)
    if shard.group is not None:
        total = torch.logsumexp(torch.stack(_gathered(total, shard.group)), dim=0)
        dist.all_reduce(picked, group=shard.group)
    tokens = picked - total
    if not topk:
        return tokens, tokens, tokens
    values, ids = logits.topk(min(topk, shard.columns), dim=-1)
    ids = ids + shard.first
    if shard.group is not None:
        # Each rank's best, of which the best of all are among; a shard of padding has none.
        values, ids = _best_of_all(values, ids, topk, shard.group)
    return tokens, ids.to(torch.int32), values - total[:, None]


def _best_of_all(values: Tensor, ids: Tensor, topk: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    missing = topk - values.shape[1]
    if missing > 0:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)  # which marks entries that are not there
    everyone = torch.cat(_gathered(values, group), dim=1)
    names = torch.cat(_gathered(ids, group), dim=1)
    best, index = everyone.topk(topk, dim=-1)
    return best, names.gather(1, index)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
