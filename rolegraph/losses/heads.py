"""Output heads and the vocabulary columns that two of them share, on one rank or over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.projection import accumulate, operands, precision, project


@dataclass(frozen=True)
class Head:
    """An output head, or this rank's rows of one: logits = cap(scale * (hidden @ weight.T + bias)).

    cap(x) = soft_cap * tanh(x / soft_cap), or x without one.
    """

    weight: Tensor
    """[rows, h]"""
    bias: Tensor | None = None
    """[rows]"""
    scale: float = 1.0
    soft_cap: float | None = None
    first: int | None = None
    """The token id of row 0; null: the shards of the group follow each other in rank order."""
    columns: int | None = None
    """Rows that stand for token ids; those after them are padding. Null: all (padding at the end of the whole
    vocabulary is cut by the vocabulary size)."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(f"a head's weight is [rows, h], not {list(self.weight.shape)}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"a head of {len(self.weight)} rows has a bias of shape {list(self.bias.shape)}")
        if self.soft_cap is not None and not self.soft_cap > 0.0:
            raise ValueError(f"soft_cap is {self.soft_cap}: null for none, or a number above 0")
        if self.columns is not None and not 0 <= self.columns <= len(self.weight):
            raise ValueError(f"a head of {len(self.weight)} rows cannot have {self.columns} columns")

    @property
    def shard(self) -> Shard:
        """Where its columns lie."""
        return Shard(len(self.weight) if self.columns is None else self.columns, self.first)


@dataclass(frozen=True)
class Shard:
    """Columns of the vocabulary that one rank holds."""

    columns: int
    first: int | None = None
    """The token id of the first; null: after those of the ranks before."""


@dataclass(frozen=True)
class Common:
    """The token ids that this rank compares: columns of both sides, padding left out."""

    student: int
    """The first of them among the student's columns here."""
    teacher: int
    """The same among the teacher's."""
    columns: int
    begin: int
    """The first of them itself."""
    most: int
    """The most columns that any rank of the group compares."""
    vocab_size: int
    """How many ids are compared in all."""


def as_head(head: Tensor | Head) -> Head:
    """A weight alone is a head as well."""
    return head if isinstance(head, Head) else Head(head)


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Null for a group of one."""
    return group if group is not None and dist.get_world_size(group) > 1 else None


def common_columns(
    student: Shard, teacher: Shard, vocab_size: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> Common:
    """Agree over the group on who compares which ids: 0 to `vocab_size` (null: as far as both sides reach).

    Raises ValueError, on every rank, if some id has no rank that holds it on both sides, or more than one.
    """
    group = group_of(group)
    rank = 0 if group is None else dist.get_rank(group)
    own = [-1 if shard.first is None else shard.first for shard in (student, teacher)]
    every = torch.tensor([[own[0], student.columns, own[1], teacher.columns]], device=device)
    if group is not None:
        parts = [torch.empty_like(every) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, every, group=group)
        every = torch.cat(parts)
    table: list[list[int]] = every.tolist()
    sides = _ranges([row[:2] for row in table]), _ranges([row[2:] for row in table])
    reach = min(max(stop for _, stop in side) for side in sides)
    vocab_size = reach if vocab_size is None else vocab_size
    if not 0 < vocab_size <= reach:
        raise ValueError(f"vocab_size is {vocab_size}, but the smaller of both heads has columns for 0..{reach - 1}")
    shared = [_overlap(s, t, vocab_size) for s, t in zip(*sides, strict=True)]
    _check_cover(shared, vocab_size)
    start, stop = shared[rank]
    return Common(
        student=start - sides[0][rank][0],
        teacher=start - sides[1][rank][0],
        columns=stop - start,
        begin=start,
        most=max(stop - start for start, stop in shared),
        vocab_size=vocab_size,
    )


def _ranges(shards: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """First id and the one after the last of each rank, from (first or -1, columns)."""
    ranges, end = [], 0
    for first, columns in shards:
        start = end if first < 0 else first
        end = start + columns
        ranges.append((start, end))
    return ranges


def _overlap(student: tuple[int, int], teacher: tuple[int, int], vocab_size: int) -> tuple[int, int]:
    """The ids of both shards that are no padding; (first, first) of the student's for none."""
    start, stop = max(student[0], teacher[0]), min(student[1], teacher[1], vocab_size)
    return (start, stop) if start < stop else (student[0], student[0])


def _check_cover(shared: list[tuple[int, int]], vocab_size: int) -> None:
    """Each id is compared once."""
    end = 0
    for start, stop in sorted(span for span in shared if span[0] < span[1]):
        if start != end:
            what = "compared by no rank" if start > end else "compared by two ranks"
            raise ValueError(
                f"token ids {min(start, end)}..{max(start, end) - 1} are {what}: cut the student's and the teacher's "
                "vocabulary at the same ids (Head.first and Head.columns say where a shard begins and ends)"
            )
        end = stop
    if end < vocab_size:
        raise ValueError(
            f"token ids {end}..{vocab_size - 1} are compared by no rank: cut the student's and the teacher's "
            "vocabulary at the same ids (Head.first and Head.columns say where a shard begins and ends)"
        )


class Projector:
    """A head ready for many chunks of hidden states: the weight in the type of the GEMMs, one factor for the scale."""

    def __init__(self, head: Head, hidden: Tensor, start: int, temperature: float) -> None:
        if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
            raise ValueError(
                f"hidden states of shape {list(hidden.shape)} do not fit a head of {list(head.weight.shape)}: "
                "they are [tokens, h] and [rows, h]"
            )
        self.states, self.matrix = operands(hidden.detach(), head.weight.detach())
        self.scale = head.scale / temperature
        self._bias = None if head.bias is None else head.bias.detach().to(precision(self.states))
        self._start = start
        self._cap = None if head.soft_cap is None else head.soft_cap / temperature

    @property
    def capped(self) -> bool:
        """Whether `bend` is needed for the gradient."""
        return self._cap is not None

    def rows(self, start: int, stop: int) -> Tensor:
        """The weight of columns counted from the first common one, [columns, h]."""
        return self.matrix[self._start + start : self._start + stop]

    def write(self, tokens: slice, start: int, stop: int, out: Tensor) -> None:
        """Logits over the temperature of some tokens for columns start to stop, into `out`."""
        bias = None if self._bias is None else self._bias[self._start + start : self._start + stop]
        project(self.states[tokens], self.rows(start, stop), out, scale=self.scale, bias=bias)
        if self._cap is not None:
            out.div_(self._cap).tanh_().mul_(self._cap)

    def bend(self, logits: Tensor, out: Tensor) -> Tensor:
        """The derivative of the cap where it gave `logits`, 1 - tanh^2, in `out`."""
        assert self._cap is not None
        return torch.div(logits, self._cap, out=out).square_().neg_().add_(1.0)

    def take_rows(self, columns: Tensor, room: Tensor) -> Tensor:
        """The weights of [n] common columns, [n, h], in `room` where it has their type."""
        index = columns + self._start
        out = room if room.dtype == self.matrix.dtype else None
        return torch.index_select(self.matrix, 0, index, out=out)

    def write_picked(self, tokens: slice, rows: Tensor, columns: Tensor) -> Tensor:
        """Logits over the temperature at [tokens, K] common columns whose weights are `rows` [tokens, K, h]."""
        logits = torch.bmm(rows, self.states[tokens][:, :, None])[:, :, 0].to(precision(self.states))
        if self._bias is not None:
            logits += self._bias[columns + self._start]
        logits *= self.scale
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)


class Gradients:
    """The gradients of hidden states, weight and bias, added up chunk by chunk."""

    def __init__(self, student: Projector, common: Common, needed: tuple[bool, ...]) -> None:
        states, matrix = student.states, student.matrix
        self.wanted = any(needed)
        self.dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
        self._student, self._common = student, common
        self._hidden = torch.empty_like(states, dtype=self.dtype) if needed[0] else None
        self._weight = torch.empty_like(matrix, dtype=self.dtype) if needed[1] else None
        self._bias = states.new_zeros(len(matrix), dtype=self.dtype) if needed[2] else None
        self._fresh = True
        if self._weight is not None:
            # Padding rows get a zero gradient, not the garbage of an empty tensor.
            first = common.student
            self._weight[:first].zero_()
            self._weight[first + common.columns :].zero_()

    def add(self, part: slice, factors: Tensor, slopes: Iterator[tuple[tuple[int, int], Tensor]]) -> None:
        """Add a chunk: `slopes` are ((start, stop), [tokens, columns]) of the common columns, times `factors`."""
        states, matrix = self._student.states, self._student.matrix
        weighted = (states[part] * (factors * self._student.scale)[:, None]).to(matrix.dtype)
        hidden = None if self._hidden is None else self._hidden[part].zero_()
        for (start, stop), slope in slopes:
            operand = slope.to(matrix.dtype)
            rows = slice(self._common.student + start, self._common.student + stop)
            if self._weight is not None:
                accumulate(self._weight[rows], operand.t(), weighted, first=self._fresh)
            if self._bias is not None:
                self._bias[rows].addmv_(slope.t(), factors * self._student.scale)
            if hidden is not None:
                accumulate(hidden, operand, matrix[rows])
        if hidden is not None:
            hidden.mul_((factors * self._student.scale)[:, None])
        self._fresh = False

    def add_picked(
        self, part: slice, factors: Tensor, slopes: Tensor, columns: Tensor, rows: Tensor | None, room: Tensor
    ) -> None:
        """Add a chunk whose gradient in the logits is `slopes` at [tokens, K] common columns and 0 elsewhere.

        `rows` [tokens, K, h] are the weights there, null for a shard without columns; `room` [tokens * K, h], which may
        hold them, is written to.
        """
        states, scaled = self._student.states, factors * self._student.scale
        if self._hidden is not None:
            self._hidden[part].zero_()
        if self._fresh and self._weight is not None:
            self._weight.zero_()
        self._fresh = False
        if rows is None:
            return
        index = (columns + self._common.student).flatten()
        if self._hidden is not None:
            product = torch.bmm(slopes.to(rows.dtype)[:, None], rows)[:, 0].to(self.dtype)
            torch.mul(product, scaled[:, None], out=self._hidden[part])
        if self._weight is not None:
            weighted = states[part].to(self.dtype) * scaled[:, None]
            torch.mul(slopes[:, :, None], weighted[:, None, :], out=room.view(*slopes.shape, -1))
            self._weight.index_add_(0, index, room)
        if self._bias is not None:
            self._bias.index_add_(0, index, (slopes * scaled[:, None]).flatten())

    def finished(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Each gradient in the type of its input, null where it is not needed."""
        if self._fresh and self._weight is not None:
            self._weight.zero_()
        pairs = ((self._hidden, hidden), (self._weight, weight), (self._bias, bias))
        return tuple(None if own is None or of is None else own.to(of.dtype) for own, of in pairs)
