"""Generalized Jensen-Shannon divergence between a student's and a teacher's next-token distributions, nats a token.

With S and T the softmaxes of logits / temperature (GKD, arXiv:2306.13649):

    beta = 0       KL(T || S), the forward KL
    beta = 1       KL(S || T), the reverse KL
    0 < beta < 1   beta * KL(T || M) + (1 - beta) * KL(S || M),  M = beta * T + (1 - beta) * S

The formula in the middle does not meet the KLs at the ends: it tends to 0 there, as beta * KL(T || S) and
(1 - beta) * KL(S || T). For random logits of standard deviation 2 over 1,000 tokens and a student off by 1,

    beta    0      0.001   0.01    0.1     0.5     0.9     0.99    0.999   1
    nats    0.485  0.0005  0.0048  0.0414  0.1075  0.0409  0.0047  0.0005  0.477

so a beta near an end is a loss near 0 (`rolegraph.losses.config.beta_near_end` warns). No value is clamped.

`generalized_jsd` takes logits, `linear_generalized_jsd` hidden states and output heads, `topk_divergence` and
`linear_topk_divergence` the teacher's top-K in place of its logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rolegraph.losses.comparison import Comparison, Measure, Metrics, check_measure, check_tokens, chunk_tokens
from rolegraph.losses.fused import Divergence
from rolegraph.losses.heads import Common, Head, Shard, common_columns, group_of
from rolegraph.losses.linear_divergence import linear_generalized_jsd
from rolegraph.losses.linear_topk import linear_topk_divergence
from rolegraph.losses.projection import precision
from rolegraph.losses.topk import TopkMode, topk_divergence

__all__ = [
    "Divergence",
    "Head",
    "Metrics",
    "TopkMode",
    "generalized_jsd",
    "linear_generalized_jsd",
    "linear_topk_divergence",
    "topk_divergence",
]


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The divergence (nats) of each token, [tokens], from [tokens, vocab] logits; a gradient for the student's alone.

    The two may differ in width: ids from `vocab_size` on (null: where the narrower ends) are padding, without
    probability or gradient. In a tensor-parallel `group` each rank gives its columns, shard after shard in rank order,
    of any sizes but cut at the same ids on both sides; every rank gets the whole result and its own columns' gradient.

    Logits are finite. The arithmetic is float32, float64 for float64 logits. Memory is one [tokens, vocab] tensor, the
    gradient, made in the same pass.

    Raises ValueError for a beta outside 0..1, a temperature that is not above 0, or shapes that do not fit.
    """
    check_measure(beta, temperature)
    check_tokens(student_logits, teacher_logits)
    group = group_of(group)
    shards = Shard(student_logits.shape[-1]), Shard(teacher_logits.shape[-1])
    common = common_columns(*shards, vocab_size, group, student_logits.device)
    measure = Measure(beta, temperature, False, group)
    values: Tensor = _LogitsDivergence.apply(  # type: ignore[no-untyped-call]
        student_logits, teacher_logits, measure, common, torch.is_grad_enabled()
    )
    return values


class _LogitsDivergence(torch.autograd.Function):
    """The gradient for a unit weight of each token is kept; the backward scales its rows."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, student: Tensor, teacher: Tensor, measure: Measure, common: Common, gradients: bool
    ) -> Tensor:
        tokens = len(student)
        size = chunk_tokens(tokens, common.most, student, None)
        comparison = Comparison(measure, common.columns, size, student)
        wanted = gradients and ctx.needs_input_grad[0]
        slopes = torch.zeros_like(student if wanted else student[:0])
        values = torch.empty(tokens, dtype=precision(student), device=student.device)
        for start in range(0, tokens, size):
            part = slice(start, min(start + size, tokens))
            writers = (
                partial(_write, student[part], common.student, measure.temperature),
                partial(_write, teacher[part], common.teacher, measure.temperature),
            )
            values[part], _ = comparison.compare(*writers, part.stop - part.start)
            for block, (first, last) in enumerate(comparison.spans if wanted else ()):
                columns = slice(common.student + first, common.student + last)
                slopes[part, columns] = comparison.slope(block).mul_(comparison.factor / measure.temperature)
        comparison.close()
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:  # type: ignore[no-untyped-def]
        (slopes,) = ctx.saved_tensors
        return (slopes * grad[:, None]).to(slopes.dtype), None, None, None, None


def _write(logits: Tensor, offset: int, temperature: float, start: int, stop: int, out: Tensor) -> None:
    """Columns of given logits over the temperature."""
    out.copy_(logits[:, offset + start : offset + stop]).div_(temperature)
