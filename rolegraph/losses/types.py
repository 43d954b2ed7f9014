"""What a loss is given and what it returns. A loss is a pure function of tensors, free of configs and of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.losses.heads import Head


@dataclass(frozen=True)
class Totals:
    """Counts over the whole global batch, the denominators of every loss."""

    tokens: Tensor
    """Response tokens with mask 1, a scalar float tensor."""
    rows: Tensor
    """Rows with at least one such token, a scalar float tensor."""


@dataclass(frozen=True)
class States:
    """A model's hidden states at some response tokens, and the head that turns them into logits."""

    hidden: Tensor
    """[tokens, h] after the final norm, those that predict each token."""
    head: Head
    """This rank's rows of it."""
    vocab_size: int
    """Ids from here on are padding."""
    temperature: float
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other rows."""


@dataclass(frozen=True)
class Steps:
    """The scored steps of some rows, flat: row after row."""

    scores: Tensor
    """[steps] float64, NaN where a step has none."""
    row: Tensor
    """[steps] int64, the row each belongs to."""
    last: Tensor
    """[steps] int64, the last token of each among the tokens of the batch; -1 for one that has none."""


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of some rows, flat: row after row, without padding."""

    logprobs: Tensor
    """[tokens] natural log, of the current weights, at the sampling temperature, with a gradient; zeros without one for
    a loss that needs none."""
    mask: Tensor
    """[tokens] float, 1 where the policy produced the token."""
    row: Tensor
    """[tokens] int64, the row (0-based in this batch) each token belongs to."""
    rows: int
    columns: Mapping[str, Tensor]
    """Every numeric column of the rows by name: per-token ones [tokens], per-row ones [rows], nulls as NaN."""
    totals: Totals
    entropy: Tensor | None = None
    """[tokens] of the current weights, detached; there when the loss asks for it."""
    student: States | None = None
    """Of the current weights, with gradients; there when the loss asks for states."""
    teacher: States | None = None
    """Of the teacher, where the rows have its hidden states and the loss asks for states."""
    steps: Steps | None = None
    """Of `prepare`: the steps of the rows where they have `step_scores` and `step_ends`."""

    def per_token(self, row_values: Tensor) -> Tensor:
        """Spread a [rows] tensor over the tokens of each row, [tokens]."""
        return row_values[self.row]

    def per_row(self, token_values: Tensor) -> Tensor:
        """Sum a [tokens] tensor over the masked tokens of each row, [rows]."""
        out = torch.zeros(self.rows, dtype=token_values.dtype, device=token_values.device)
        return out.index_add(0, self.row, token_values * self.mask.to(token_values.dtype))

    def with_columns(self, columns: Mapping[str, Tensor]) -> TokenBatch:
        """The same batch with more columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Stat:
    """A metric on its way to the global one: sum over weight, or a maximum."""

    value: Tensor
    """The sum (or the maximum) over this micro-batch, a detached scalar."""
    weight: Tensor | None = None
    """What the sum is divided by in the end; null for a maximum."""


@dataclass(frozen=True)
class LossOutput:
    """The micro-batch's share of the global loss, and its share of the metrics."""

    loss: Tensor
    """Scalar, divided by global denominators already: the shares of all micro-batches and ranks add up to the loss."""
    stats: Mapping[str, Stat] = field(default_factory=dict)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Reduce:
    """Reductions over the data-parallel ranks; the defaults are those of a single rank."""

    sum: Callable[[Tensor], Tensor] = _same
    """Elementwise sum over ranks."""
    max: Callable[[Tensor], Tensor] = _same
    """Elementwise maximum over ranks."""
    gather: Callable[[Tensor], Tensor] = _same
    """Concatenation over ranks of 1-d tensors whose lengths may differ."""


@runtime_checkable
class Loss(Protocol):
    """A loss: called once a micro-batch.

    Optional attributes, looked up by name with these defaults: `needs_entropy` (False) asks for `TokenBatch.entropy`;
    `needs_states` (False) for `TokenBatch.student` and `teacher`; `needs_logprobs` (True) for `TokenBatch.logprobs`, at
    `logprob_temperature` (null: the step's);
    `prepare(tokens, reduce) -> columns` runs once a step without gradients over all rows of the rank, before the first
    micro-batch, and adds per-token or per-row columns that depend on the whole global batch (its `logprobs` are the
    column of that name, else `rollout_logprobs`).
    """

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss of one micro-batch."""
        ...
