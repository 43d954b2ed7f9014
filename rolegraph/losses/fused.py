"""A sum over tokens from hidden states and an output head, whose gradient is computed with its value.

The idea is that of Liger Kernel (arXiv:2410.10989): a chunk of tokens is projected, compared, and its gradient goes
through the head before the next chunk takes the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rolegraph.losses.comparison import Metrics
from rolegraph.losses.heads import Common, Gradients, Head, Projector


class Divergence(NamedTuple):
    """What a comparison of hidden states gives."""

    loss: Tensor
    """Sum of weights * values, a scalar; the one result with a gradient."""
    values: Tensor
    """[tokens] nats, detached: those of the same comparison of logits."""
    metrics: Metrics | None
    """Null unless asked for."""


class Chunks(Protocol):
    """A comparison of one chunk of tokens after the other."""

    size: int
    """Tokens a chunk, the same on every rank of a tensor-parallel group."""

    def add(self, part: slice, factors: Tensor) -> tuple[Tensor, Metrics | None]:
        """Values and metrics of the tokens of `part`; their gradients times `factors` go to the others."""
        ...

    def close(self) -> None:
        """No more chunks: memory goes back."""
        ...


@dataclass(frozen=True)
class Call:
    """What a fused sum is computed from, besides the student's tensors."""

    head: Head
    common: Common
    temperature: float
    weights: Tensor | None
    metrics: bool
    start: Callable[[Projector, Gradients], Chunks]


def fused_divergence(hidden: Tensor, call: Call) -> Divergence:
    """The weighted sum over the tokens of `hidden` [tokens, h], with its gradient where one can be asked for."""
    loss, values, *found = _Fused.apply(  # type: ignore[no-untyped-call]
        hidden, call.head.weight, call.head.bias, call, torch.is_grad_enabled()
    )
    return Divergence(loss, values, Metrics(*found) if call.metrics else None)


class _Fused(torch.autograd.Function):
    """The backward hands on the gradient of the forward; a second one computes it again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, enabled: bool):  # type: ignore[no-untyped-def]
        ctx.call, ctx.needed = call, tuple(enabled and needs for needs in ctx.needs_input_grad[:3])
        ctx.save_for_backward(hidden, weight, bias)
        values, found, ctx.gradients = _compute(hidden, weight, bias, call, ctx.needed)
        others = tuple(found.unbind())
        ctx.mark_non_differentiable(values, *others)
        ctx.set_materialize_grads(False)
        weights = torch.ones_like(values) if call.weights is None else call.weights.to(values.dtype)
        return torch.dot(values, weights), values, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, *_: Any):  # type: ignore[no-untyped-def]
        # Given up and scaled in place: a copy of the head's gradient would be the largest tensor of the step.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias = ctx.saved_tensors
            gradients = _compute(hidden, weight, bias, ctx.call, ctx.needed)[2]
        return (*(None if part is None or grad is None else part.mul_(grad) for part in gradients), None, None)


def _compute(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Values [tokens], metrics [number, tokens], and the gradients of hidden states, weight and bias."""
    student = Projector(call.head, hidden, call.common.student, call.temperature)
    gradients = Gradients(student, call.common, needed)
    tokens = len(hidden)
    values = torch.empty(tokens, dtype=gradients.dtype, device=hidden.device)
    found = values.new_empty(len(Metrics._fields) if call.metrics else 0, tokens)
    factors = torch.ones_like(values) if call.weights is None else call.weights.detach().to(values.dtype)
    chunks = call.start(student, gradients)
    for start in range(0, tokens, chunks.size):
        part = slice(start, min(start + chunks.size, tokens))
        values[part], metrics = chunks.add(part, factors[part])
        if call.metrics and metrics is not None:
            found[:, part] = torch.stack(metrics)
    chunks.close()
    return values, found, gradients.finished(hidden, weight, bias)
