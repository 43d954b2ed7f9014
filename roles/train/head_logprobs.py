"""Log-probabilities of labels under any output head, by the kernel for a plain projection wherever that can be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rolegraph.losses.heads import Head
from roles.train.logprob import linear_logprobs
from roles.train.scoring import CHUNK_BYTES


def head_logprobs(
    states: Tensor,
    head: Head,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (nats) of `labels`, and without gradient the entropies; both [tokens] float32.

    `states` [tokens, h]; `group` holds shards of the vocabulary, which a capped head must not have.
    """
    weight = head.weight
    if head.soft_cap is not None:
        return _capped(states, head, labels, temperature, entropy)
    if head.bias is not None:  # one more state, which is always 1
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
        weight = torch.cat([weight, head.bias[:, None].to(weight.dtype)], dim=1)
    return linear_logprobs(
        states,
        weight,
        labels,
        temperature=temperature / head.scale,
        vocab_size=vocab_size,
        group=group,
        entropy=entropy,
    )


def _capped(
    states: Tensor, head: Head, labels: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """A few tokens at a time, whose logits are computed again in the backward."""
    step = max(1, CHUNK_BYTES // (4 * len(head.weight)))
    parts = [
        checkpoint(
            _chunk, states[i : i + step], head, head.weight, labels[i : i + step], temperature, use_reentrant=False
        )
        for i in range(0, len(states), step)
    ]
    if not parts:
        nothing = states.new_zeros(0, dtype=torch.float32)
        return nothing, nothing if entropy else None
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropies.detach() if entropy else None


def _chunk(states: Tensor, head: Head, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = states.float() @ weight.float().t()
    if head.bias is not None:
        logits = logits + head.bias.float()
    logits = logits * head.scale
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    table = torch.log_softmax(logits / temperature, -1)
    return table.gather(-1, labels[:, None])[:, 0], torch.special.entr(table.detach().exp()).sum(-1)
