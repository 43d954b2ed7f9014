"""`topk_divergence` straight from the student's last hidden states, without the logits of all tokens.

Mode tail projects to the whole vocabulary, a chunk of tokens at a time. Mode renormalize projects to the teacher's K
tokens alone: K rows of the head a token instead of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.comparison import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES, Metrics, check_tokens, chunk_tokens, spans_of
from rolegraph.losses.fused import Call, Divergence, fused_divergence
from rolegraph.losses.heads import Common, Gradients, Head, Projector, as_head, common_columns, group_of
from rolegraph.losses.projection import give_buffer, take_buffer
from rolegraph.losses.topk import (
    Picks,
    TopkMode,
    TopkOptions,
    compare_topk,
    finite,
    logsumexp_outside,
    over_shards,
)


def linear_topk_divergence(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    mode: TopkMode = "renormalize",
    teacher_temperature: float = 1.0,
    weights: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    metrics: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Divergence:
    """`topk_divergence` of the logits that the head gives for [tokens, h] hidden states.

    Heads, `weights`, `group` and gradients are as in `linear_generalized_jsd`, teacher ids, logprobs,
    modes and errors as in `topk_divergence`. Memory beyond inputs and gradients is one buffer of [chunk_size, columns]
    in mode tail (two with a soft cap), of [chunk_size, K, h] in mode renormalize; null chooses 64 MiB (512 MiB on a
    GPU). On GPUs mode renormalize adds up the head's gradient in any order: it is not deterministic there.
    """
    head = as_head(student_head)
    options = TopkOptions(beta, temperature, mode, teacher_temperature)
    options.check(teacher_ids, teacher_logprobs, len(student_hidden))
    check_tokens(student_hidden, teacher_ids, weights)
    group = group_of(group)
    common = common_columns(head.shard, head.shard, vocab_size, group, student_hidden.device)
    picks = Picks.of(teacher_ids, common)
    work = _Work(common, picks, teacher_logprobs, options, group, chunk_size)
    start = partial(_Tail if mode == "tail" else _Picked, work)
    return fused_divergence(student_hidden, Call(head, common, temperature, weights, metrics, start))


@dataclass(frozen=True)
class _Work:
    """What does not change over the chunks of one work."""

    common: Common
    picks: Picks
    logprobs: Tensor
    options: TopkOptions
    group: dist.ProcessGroup | None
    chunk_size: int | None

    def compare(
        self, part: slice, picked: Tensor, outside: Tensor | None
    ) -> tuple[Tensor, Metrics, Tensor, Tensor | None]:
        """Values and metrics of a chunk, and the gradients of the values in `picked` and `outside`."""
        with torch.enable_grad():
            leaf = picked.detach().requires_grad_()
            other = None if outside is None else outside.detach().requires_grad_()
            found = compare_topk(leaf, other, self.logprobs[part], self.picks.part(part), self.options)
            leaves = [leaf] if other is None else [leaf, other]
            slopes = torch.autograd.grad(found.values.sum(), leaves)
        return found.values.detach(), found.metrics, slopes[0], None if other is None else slopes[1]


class _Tail:
    """Chunks of tokens with the logits of the whole shard."""

    def __init__(self, work: _Work, student: Projector, gradients: Gradients) -> None:
        self._work, self._student, self._gradients = work, student, gradients
        columns, states = work.common.columns, student.states
        self.size = chunk_tokens(len(states), work.common.most, states, work.chunk_size)
        self._spans = spans_of(columns, self.size, states)
        self._capped = gradients.wanted and student.capped
        self._buffer = take_buffer((1 + int(self._capped)) * self.size * columns, states)

    def close(self) -> None:
        give_buffer(self._buffer)

    def add(self, part: slice, factors: Tensor) -> tuple[Tensor, Metrics | None]:
        work, columns = self._work, self._work.common.columns
        picks, count = work.picks.part(part), part.stop - part.start
        wide = self._buffer[: count * columns].view(count, columns)
        for start, stop in self._spans:
            self._student.write(part, start, stop, wide[:, start:stop])
        bend = self._buffer[count * columns :][: count * columns].view(count, columns) if self._capped else None
        if bend is not None:
            self._student.bend(wide, bend)
        picked = over_shards(picks.take(wide), work.group)
        outside = logsumexp_outside(wide, picks, work.group)
        values, metrics, slopes, slope_outside = work.compare(part, picked, outside)
        if self._gradients.wanted:
            assert slope_outside is not None
            wide.sub_(finite(outside)[:, None]).exp_().mul_(slope_outside[:, None])
            picks.add(wide, slopes)
            if bend is not None:
                wide.mul_(bend)
            self._gradients.add(part, factors, ((span, wide[:, span[0] : span[1]]) for span in self._spans))
        return values, metrics


class _Picked:
    """Chunks of tokens with the logits of the teacher's ids alone."""

    def __init__(self, work: _Work, student: Projector, gradients: Gradients) -> None:
        self._work, self._student, self._gradients = work, student, gradients
        states = student.states
        self._slot = work.logprobs.shape[1] * states.shape[1]
        chunk_bytes = CPU_CHUNK_BYTES if states.device.type == "cpu" else GPU_CHUNK_BYTES
        fits = max(chunk_bytes // max(self._slot * gradients.dtype.itemsize, 1), 1)
        self.size = fits if work.chunk_size is None else chunk_tokens(len(states), 1, states, work.chunk_size)
        self.size = min(self.size, max(len(states), 1))
        self._buffer = take_buffer(self.size * self._slot, states)

    def close(self) -> None:
        give_buffer(self._buffer)

    def add(self, part: slice, factors: Tensor) -> tuple[Tensor, Metrics | None]:
        work, student = self._work, self._student
        picks = work.picks.part(part)
        flat = picks.columns.flatten()
        room = self._buffer[: len(flat) * student.states.shape[1]].view(len(flat), -1)
        if work.common.columns:
            rows = student.take_rows(flat, room).view(*picks.columns.shape, -1)
            own = torch.where(picks.owned, student.write_picked(part, rows, picks.columns), 0.0)
        else:
            rows, own = None, torch.zeros_like(picks.columns, dtype=self._gradients.dtype)
        values, metrics, slopes, _ = work.compare(part, over_shards(own.clone(), work.group), None)
        if self._gradients.wanted:
            if student.capped:
                slopes = slopes * student.bend(own, torch.empty_like(own))
            self._gradients.add_picked(part, factors, torch.where(picks.owned, slopes, 0.0), picks.columns, rows, room)
        return values, metrics
