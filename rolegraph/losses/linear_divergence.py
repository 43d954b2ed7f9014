"""The divergence of two models straight from their last hidden states, without ever holding their logits.

A chunk of tokens at a time, not of columns, because the gradient of a token needs its divergence over the whole
vocabulary first.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.comparison import Comparison, Measure, Metrics, check_measure, check_tokens, chunk_tokens
from rolegraph.losses.fused import Call, Divergence, fused_divergence
from rolegraph.losses.heads import Common, Gradients, Head, Projector, as_head, common_columns, group_of


def linear_generalized_jsd(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor,
    teacher_head: Tensor | Head,
    *,
    beta: float,
    temperature: float = 1.0,
    weights: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    metrics: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Divergence:
    """`generalized_jsd` of the logits that the heads give for [tokens, h] hidden states of student and teacher.

    A head is a `Head`, or its weight [rows, h] alone; the two sides may differ in h and in rows. Ids from `vocab_size`
    on (null: where the smaller head ends) are padding: no probability on either side, no gradient.

    The gradients (student's hidden states, weight and bias; none for the teacher) are computed with the values, so the
    weight of each token in the sum must be known before: `weights` [tokens], null for 1, is the mask over the global
    token count, say. A head's gradient is a sum over tokens, which no factor a token could mend afterwards. A second
    backward through the same graph computes everything again.

    In a tensor-parallel `group` each rank gives its rows of both heads, cut at the same ids but of any sizes; every
    rank gets the whole result, and the gradient of `student_hidden` is this shard's part: the caller sums it over the
    group. Every rank must call, with the same tokens.

    Memory beyond inputs and gradients is two buffers of [chunk_size, columns] (three with a soft cap) and some cache-
    sized ones; null chooses buffers of 64 MiB (512 MiB on a GPU) and at least 128 tokens. On a CPU the arithmetic is
    float32 whatever the inputs (float64 for those); elsewhere the GEMMs take the inputs' type and everything between
    them is float32.

    Raises ValueError for a beta outside 0..1, a temperature that is not above 0, numbers of tokens that differ, or
    heads that are not cut at the same ids.
    """
    student, teacher = as_head(student_head), as_head(teacher_head)
    check_measure(beta, temperature)
    check_tokens(student_hidden, teacher_hidden, weights)
    group = group_of(group)
    common = common_columns(student.shard, teacher.shard, vocab_size, group, student_hidden.device)
    measure = Measure(beta, temperature, metrics, group)
    other = Projector(teacher, teacher_hidden, common.teacher, temperature)
    start = partial(_Full, measure, common, other, chunk_size)
    return fused_divergence(student_hidden, Call(student, common, temperature, weights, metrics, start))


class _Full:
    """Chunks of tokens with the logits of both sides over the whole shard."""

    def __init__(
        self,
        measure: Measure,
        common: Common,
        teacher: Projector,
        chunk_size: int | None,
        student: Projector,
        gradients: Gradients,
    ) -> None:
        states = student.states
        self.size = chunk_tokens(len(states), common.most, states, chunk_size)
        self._student, self._teacher, self._gradients = student, teacher, gradients
        self._capped = gradients.wanted and student.capped
        self._comparison = Comparison(measure, common.columns, self.size, states, extras=int(self._capped))

    def close(self) -> None:
        self._comparison.close()

    def add(self, part: slice, factors: Tensor) -> tuple[Tensor, Metrics | None]:
        comparison, count = self._comparison, part.stop - part.start
        found = comparison.compare(partial(self._write, part), partial(self._teacher.write, part), count)
        if self._gradients.wanted:
            slopes = (self._slope(block) for block in range(len(comparison.spans)))
            self._gradients.add(part, factors * comparison.factor, zip(comparison.spans, slopes, strict=True))
        return found

    def _write(self, part: slice, start: int, stop: int, out: Tensor) -> None:
        """Write the student's logits, and keep the derivative of its soft cap for the gradient."""
        self._student.write(part, start, stop, out)
        if self._capped:
            self._student.bend(out, self._comparison.extra(0, start))

    def _slope(self, block: int) -> Tensor:
        """The gradient in the student's logits before the cap, [tokens, columns of the block]."""
        slope = self._comparison.slope(block)
        return slope.mul_(self._comparison.extra(0, self._comparison.spans[block][0])) if self._capped else slope
