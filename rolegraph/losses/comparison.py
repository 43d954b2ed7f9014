"""Comparing two distributions over the vocabulary for a chunk of tokens, in blocks of columns that stay in cache.

Two passes over the blocks: the first writes the logits of both sides and takes their logsumexp; the second turns them,
in place, into the terms of the divergence and of its gradient. What is summed over blocks is summed over the shards of
a tensor-parallel group alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.projection import give_buffer, precision, take_buffer

CPU_BLOCK_BYTES = 4 * 2**20
GPU_BLOCK_BYTES = 256 * 2**20
MIN_COLUMNS = 128
CPU_CHUNK_BYTES = 64 * 2**20
GPU_CHUNK_BYTES = 512 * 2**20
MIN_CHUNK = 128

Writer = Callable[[int, int, Tensor], object]
"""Writes logits over the temperature for columns start to stop of this shard's part into [tokens, columns]."""


class Metrics(NamedTuple):
    """What else the comparison saw; every tensor is [tokens], detached, the same on every rank of the group."""

    forward_kl: Tensor
    """KL(teacher || student), nats."""
    reverse_kl: Tensor
    """KL(student || teacher), nats."""
    teacher_entropy: Tensor
    """Nats."""
    top_agreement: Tensor
    """1 where teacher and student share a most probable token, else 0."""
    mass_covered: Tensor
    """Share of the teacher's probability that was compared: 1 over the full vocabulary."""


@dataclass(frozen=True)
class Measure:
    """What is computed for each token."""

    beta: float
    temperature: float
    metrics: bool
    group: dist.ProcessGroup | None
    """Null as well for a group of one."""


class Sums(NamedTuple):
    """Sums over the columns, [tokens] each, from which all results are made. S and T are probabilities as computed:
    their sums differ from 1 by the rounding of the logsumexp."""

    student: Tensor
    """Sum of S."""
    teacher: Tensor
    """Sum of T."""
    forward: Tensor
    """Sum of T log(S/T)."""
    reverse: Tensor
    """Sum of S log(S/T)."""
    entropy: Tensor
    """Sum of T log T."""
    student_mixed: Tensor
    """Sum of S log(M/S), M the mixture."""
    teacher_mixed: Tensor
    """Sum of T log(M/T)."""

    def forward_kl(self) -> Tensor:
        """KL(T || S) = sum of T log(T/S) - T + S: an error of the logsumexp cancels, and no term is negative."""
        return -self.forward + (self.student - self.teacher)

    def reverse_kl(self) -> Tensor:
        """KL(S || T), in the same way."""
        return self.reverse + (self.teacher - self.student)

    def divergence(self, beta: float) -> Tensor:
        """The exact KLs at the ends, between them the mixture's formula, which an error of the logsumexp leaves."""
        if beta == 0.0:
            return self.forward_kl()
        if beta == 1.0:
            return self.reverse_kl()
        return -beta * self.teacher_mixed - (1.0 - beta) * self.student_mixed


def check_measure(beta: float, temperature: float) -> None:
    """Raises ValueError for a beta outside 0..1 or a temperature that is not above 0."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it lies between 0 (forward KL) and 1 (reverse KL)")
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; a divergence needs one above 0")


def check_tokens(student: Tensor, teacher: Tensor, weights: Tensor | None = None) -> None:
    """Raises ValueError if the sides, or the weights, are not about the same number of tokens."""
    if len(student) != len(teacher):
        raise ValueError(
            f"the student has {len(student)} tokens and the teacher {len(teacher)}: both need one entry a "
            "response token"
        )
    if weights is not None and weights.shape != student.shape[:1]:
        raise ValueError(f"weights of shape {list(weights.shape)} for {len(student)} tokens: give one a token")


def chunk_tokens(tokens: int, most_columns: int, states: Tensor, chunk_size: int | None) -> int:
    """Tokens a chunk, the same on every rank of a group: `chunk_size`, or even parts that fit the buffers."""
    if chunk_size is not None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; a chunk has at least one token, null chooses")
        return min(chunk_size, max(tokens, 1))
    chunk_bytes = CPU_CHUNK_BYTES if states.device.type == "cpu" else GPU_CHUNK_BYTES
    fits = max(chunk_bytes // (max(most_columns, 1) * 4), MIN_CHUNK)
    chunks = max(-(-tokens // fits), 1)
    return max(-(-tokens // chunks), 1)


def spans_of(columns: int, tokens: int, states: Tensor) -> list[tuple[int, int]]:
    """Cut `columns` into blocks for `tokens` rows."""
    block_bytes = CPU_BLOCK_BYTES if states.device.type == "cpu" else GPU_BLOCK_BYTES
    width = max(block_bytes // (max(tokens, 1) * precision(states).itemsize), MIN_COLUMNS)
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]


class Comparison:
    """Two distributions over this shard's columns for up to `tokens` rows, one chunk of rows after the other.

    `compare` takes the logits and gives the divergence of each row; after it `slope` gives the gradient of a row's
    divergence in the student's logits over the temperature, times `factor`, block by block. `extras` more blocks of
    memory are there for the caller (`extra`), from one `compare` to the next. Call `close` at the end.
    """

    def __init__(self, measure: Measure, columns: int, tokens: int, states: Tensor, extras: int = 0) -> None:
        self.spans = spans_of(columns, tokens, states)
        self._measure = measure
        self._size = columns * tokens
        width = max((stop - start for start, stop in self.spans), default=0)
        self._spares_at, self._spare_size = (2 + extras) * self._size, width * tokens
        self._buffer = take_buffer(self._spares_at + 2 * self._spare_size, states)
        # exp(+-limit) is finite and its inverse below all rounding of the sums: the bound changes no result.
        self._limit = 700.0 if precision(states) == torch.float64 else 80.0
        self._tokens = tokens
        self._sums: Sums | None = None
        self.factor = -(1.0 - measure.beta) if 0.0 < measure.beta < 1.0 else 1.0

    def close(self) -> None:
        """Let the next call have the memory."""
        give_buffer(self._buffer)

    def extra(self, index: int, start: int) -> Tensor:
        """Room of the caller's, [tokens, columns of the block that begins at column `start`]."""
        return self._view(2 + index, next(block for block, span in enumerate(self.spans) if span[0] == start))

    def compare(self, student: Writer, teacher: Writer, tokens: int) -> tuple[Tensor, Metrics | None]:
        """The divergence (nats) of each of `tokens` rows, [tokens], and the metrics if they are wanted."""
        self._tokens = tokens
        lse, peaks = self._normalisers(student, teacher)
        found = self._buffer.new_zeros(len(Sums._fields) + 1, max(len(self.spans), 1), tokens)
        found[-1].fill_(-torch.inf)
        for block in range(len(self.spans)):
            self._terms(block, lse, Sums(*found[:-1, block]), found[-1, block])
        totals, joint = found[:-1].sum(dim=1), found[-1].amax(dim=0)
        if self._measure.group is not None:
            every = _gather(torch.cat([totals, joint[None]]), self._measure.group)
            totals, joint = every[:, :-1].sum(dim=0), every[:, -1].amax(dim=0)
        self._sums = sums = Sums(*totals)
        metrics = None
        if self._measure.metrics:
            # A column is the top of both exactly if log S + log T reaches the sum of both maxima there.
            agreement = (joint >= (peaks - lse).sum(dim=0)).to(joint.dtype)
            ones = torch.ones_like(joint)
            metrics = Metrics(sums.forward_kl(), sums.reverse_kl(), -sums.entropy, agreement, ones)
        return sums.divergence(self._measure.beta), metrics

    def slope(self, block: int) -> Tensor:
        """The gradient of each row's divergence over `factor`, [tokens, columns of the block]; once a block."""
        assert self._sums is not None
        slope, student = self._view(0, block), self._view(1, block)
        beta = self._measure.beta
        if beta == 0.0:
            return slope
        mean = self._sums.reverse if beta == 1.0 else self._sums.student_mixed
        return slope.addcmul_(student, mean[:, None], value=-1.0)

    def _normalisers(self, student: Writer, teacher: Writer) -> tuple[Tensor, Tensor]:
        """Write the logits; their logsumexp and maximum over the vocabulary, [2, tokens] each."""
        peaks = self._buffer.new_full((2, max(len(self.spans), 1), self._tokens), -torch.inf)
        sums = torch.ones_like(peaks)
        for block, (start, stop) in enumerate(self.spans):
            for side, write in enumerate((student, teacher)):
                logits, spare = self._view(side, block), self._spare(0, block)
                write(start, stop, logits)
                torch.amax(logits, dim=-1, out=peaks[side, block])
                torch.sub(logits, peaks[side, block][:, None], out=spare).exp_()
                torch.sum(spare, dim=-1, out=sums[side, block])
        lse, top = torch.logsumexp(peaks + sums.log(), dim=1), peaks.amax(dim=1)
        if self._measure.group is not None:
            every = _gather(torch.stack([lse, top]), self._measure.group)
            lse, top = torch.logsumexp(every[:, 0], dim=0), every[:, 1].amax(dim=0)
        return lse, top

    def _terms(self, block: int, lse: Tensor, sums: Sums, joint: Tensor) -> None:
        """Fill in the sums of a block; its two views become the parts of the slope.

        With x = log(S/T): log(M/S) = log1p(beta * expm1(-x)) and log(M/T) = x + log(M/S), exactly 0 where S = T.
        """
        beta, every = self._measure.beta, self._measure.metrics
        first, second = self._view(0, block).sub_(lse[0][:, None]), self._view(1, block).sub_(lse[1][:, None])
        ratio = torch.sub(first, second, out=self._spare(0, block))
        teacher = self._spare(1, block)
        if every:
            torch.amax(torch.add(first, second, out=teacher), dim=-1, out=joint)
        torch.exp(second, out=teacher)
        if every:
            torch.sum(second.mul_(teacher), dim=-1, out=sums.entropy)
        student = torch.exp(first, out=second)
        torch.sum(student, dim=-1, out=sums.student)
        torch.sum(teacher, dim=-1, out=sums.teacher)
        if every or beta == 0.0:
            torch.sum(torch.mul(teacher, ratio, out=first), dim=-1, out=sums.forward)
        if every or beta == 1.0:
            torch.sum(torch.mul(student, ratio, out=first), dim=-1, out=sums.reverse)
        if beta == 0.0:
            torch.sub(student, teacher, out=first)
        elif beta < 1.0:
            ratio.clamp_(-self._limit, self._limit)
            torch.neg(ratio, out=first).expm1_().mul_(beta).log1p_()
            torch.sum(ratio.add_(first).mul_(teacher), dim=-1, out=sums.teacher_mixed)
            torch.sum(first.mul_(student), dim=-1, out=sums.student_mixed)

    def _view(self, part: int, block: int) -> Tensor:
        """A block of part 0 (student), 1 (teacher) or more (extras), contiguous."""
        start, stop = self.spans[block]
        begin = part * self._size + start * self._tokens
        return self._buffer[begin : begin + (stop - start) * self._tokens].view(self._tokens, stop - start)

    def _spare(self, index: int, block: int) -> Tensor:
        """Room for the block's columns that the next block takes again."""
        start, stop = self.spans[block]
        size = (stop - start) * self._tokens
        begin = self._spares_at + index * self._spare_size
        return self._buffer[begin : begin + size].view(self._tokens, stop - start)


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same of every rank of the group, stacked in front."""
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, own.contiguous(), group=group)
    return torch.stack(shards)
