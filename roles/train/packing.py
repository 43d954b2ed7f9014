"""Rows of a Batch to the tensors of one micro-batch, padded or packed, without a Python loop over tokens.

This is the one place of the trainer where positions shift: the output at a token predicts the next one, so response
token i of a row is predicted at position `prompt + i - 1`. A row with an empty prompt (raw-text training) has no
position that predicts its first token: that token stays in its place, so that every column keeps its alignment, but
its mask is 0, it counts in no denominator, and its logprob is reported as 0.

Packed rows that follow each other and have the same prompt may share it: it is laid out once, the responses come after
it, and each attends to the prompt and to itself (`MicroBatch.branches`). That changes no number, only how often the
prompt is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from rolegraph.batch import Batch
from rolegraph.columns import STREAMED
from roles.train.steps import COLUMNS as STEP_COLUMNS

IntArray: TypeAlias = npt.NDArray[np.int64]
NOT_PER_TOKEN = frozenset({"prompt_ids", "response_ids", "teacher_prompt_ids", *STEP_COLUMNS})
"""Columns of number lists that never are one number a token, whatever their lengths."""


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of some rows, flat: row after row, without padding (what a TokenBatch is made of)."""

    labels: Tensor
    """[tokens] int64, the token ids."""
    mask: Tensor
    """[tokens] float32, 1 where the policy produced the token and a position predicts it."""
    row: Tensor
    """[tokens] int64, the row (0-based among these rows) each token belongs to."""
    rows: int
    columns: Mapping[str, Tensor]
    """Every numeric column by name: per-token ones [tokens], per-row ones [rows]; floats are float32, nulls NaN."""

    def totals(self) -> tuple[float, float]:
        """Tokens with mask 1, and rows that have one: this rank's share of the loss denominators."""
        trained = torch.zeros(self.rows).index_add_(0, self.row, self.mask)
        return float(self.mask.sum(dtype=torch.float64)), float((trained > 0).sum())


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, and what its loss needs."""

    input_ids: Tensor
    """int64, [batch, seq] padded on the right, or [1, tokens] packed."""
    position_ids: Tensor
    """int64, of the shape of `input_ids`; each sequence counts from 0."""
    cu_seqlens: Tensor | None
    """[sequences + 1] int32, where each packed sequence starts, the padding tail as the last; null when padded. A
    prompt with the responses that share it counts as one."""
    max_seqlen: int
    """Tokens of the longest sequence, a padding tail included; of a shared prompt's, the longest response alone."""
    branches: tuple[tuple[int, ...], ...]
    """Where prompts are shared, what each packed sequence is made of: (tokens,), or (prompt, response, response, ...).
    Empty where none is shared."""
    tokens: int
    """Positions that hold a token."""
    predict: Tensor
    """[tokens] int64, the position (flat, row-major in `input_ids`) whose output predicts each response token."""
    response: ResponseTokens
    index: Sequence[int]
    """The rows of the batch that it is made of."""

    @property
    def labels(self) -> Tensor:
        """[tokens] int64, the response tokens."""
        return self.response.labels

    @property
    def mask(self) -> Tensor:
        """[tokens] float32, 1 where the token is trained on."""
        return self.response.mask

    @property
    def row(self) -> Tensor:
        """[tokens] int64, the row of each token."""
        return self.response.row

    @property
    def rows(self) -> int:
        """Rows of the batch in this micro-batch."""
        return self.response.rows

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """The numeric columns, see ResponseTokens."""
        return self.response.columns

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        response = replace(
            self.response,
            labels=move(self.labels),
            mask=move(self.mask),
            row=move(self.row),
            columns={name: move(column) for name, column in self.columns.items()},
        )
        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            cu_seqlens=None if self.cu_seqlens is None else move(self.cu_seqlens),
            predict=move(self.predict),
            response=response,
        )


def collate(
    batch: Batch,
    rows: Sequence[int],
    *,
    padding_free: bool,
    share_prompts: bool = False,
    multiple_of: int = 1,
    pad_id: int = 0,
) -> MicroBatch:
    """Lay out `rows` of a local batch as one micro-batch.

    Padded rows are as long as the longest, rounded up to `multiple_of`. Packed rows follow each other in one sequence
    whose length is rounded up by a tail of `pad_id`, a sequence of its own that nothing attends to; with
    `share_prompts`, neighbours in `rows` that have the same prompt share it. No rows, or rows without a token: a dummy
    row without response tokens, so that the ranks of a group stay in step.

    Raises AlignmentError, with the uid, where a per-token column has another length than the response.
    """
    index = np.asarray(rows, dtype=np.int64)
    prompt, prompt_lengths = _gather(batch, "prompt_ids", index)
    response, response_lengths = _gather(batch, "response_ids", index)
    if padding_free:
        first = ~_repeats(batch, index) if share_prompts else np.ones(len(index), dtype=bool)
        layout = _pack(prompt_lengths, response_lengths, first, multiple_of)
    else:
        layout = _pad(prompt_lengths, response_lengths, multiple_of)

    input_ids = np.full(layout.positions.shape, pad_id, dtype=np.int64)
    flat = input_ids.reshape(-1)
    # The rows of a shared prompt all write it, to the same place.
    flat[_spread(layout.prompts, prompt_lengths)] = prompt
    target = _spread(layout.responses, response_lengths)
    flat[target] = response
    predict = target - 1
    filled = response_lengths > 0
    # A prompt's last position predicts the first token of every response. Without a prompt that token points at
    # itself: any position would do, its mask is 0.
    firsts = (np.cumsum(response_lengths) - response_lengths)[filled]
    predict[firsts] = np.where(prompt_lengths > 0, layout.prompts + prompt_lengths - 1, layout.responses)[filled]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(layout.positions),
        cu_seqlens=None if layout.cu_seqlens is None else torch.from_numpy(layout.cu_seqlens),
        max_seqlen=layout.max_seqlen,
        branches=layout.branches,
        tokens=layout.tokens,
        predict=torch.from_numpy(predict),
        response=response_tokens(batch, rows),
        index=rows,
    )


def shared_prompts(batch: Batch) -> IntArray:
    """[rows] the tokens of each row's prompt where the row before it has the same one, else 0."""
    lengths = np.diff(_offsets(batch, "prompt_ids"))
    return np.where(_repeats(batch, np.arange(len(batch))), lengths, 0)


def _repeats(batch: Batch, index: IntArray) -> npt.NDArray[np.bool_]:
    """[rows] whether each row has the same prompt as the one before it; an empty prompt is none to share."""
    ragged = batch.ragged("prompt_ids")
    bounds = np.stack([_offsets(batch, "prompt_ids")[index], _offsets(batch, "prompt_ids")[index + 1]], axis=1).tolist()
    prompts = [ragged.values[start:stop] for start, stop in bounds]
    same = [len(one) > 0 and np.array_equal(one, two) for one, two in itertools.pairwise(prompts)]
    return np.array([False, *same][: len(index)], dtype=bool)


def response_tokens(batch: Batch, rows: Sequence[int] | None = None) -> ResponseTokens:
    """The response tokens and the numeric columns of `rows` (null: all) of a local batch.

    Raises AlignmentError, with the uid, where a per-token column has another length than the response.
    """
    index = np.arange(len(batch)) if rows is None else np.asarray(rows, dtype=np.int64)
    labels, lengths = _gather(batch, "response_ids", index)
    columns = _columns(batch, index)
    mask = columns.get("response_mask")
    mask = torch.ones(len(labels)) if mask is None else mask.to(torch.float32, copy=True)
    offsets = np.cumsum(lengths) - lengths
    prompt_lengths = np.diff(_offsets(batch, "prompt_ids"))[index]
    mask[torch.from_numpy(offsets[(prompt_lengths == 0) & (lengths > 0)])] = 0.0
    return ResponseTokens(
        labels=torch.from_numpy(labels.astype(np.int64)),
        mask=mask,
        row=torch.from_numpy(np.repeat(np.arange(len(index)), lengths)),
        rows=len(index),
        columns=columns,
    )


def per_token_column(batch: Batch, parts: Sequence[tuple[Sequence[int], npt.NDArray[np.float32]]]) -> pa.ListArray:
    """Put per-token results of micro-batches back into the row order of `batch`, as a list<float32> column.

    A part is the rows of a micro-batch and their flat [tokens] values; the parts cover every row once. Tokens without
    a predictor get 0.
    """
    offsets = _offsets(batch, "response_ids")
    lengths = np.diff(offsets)
    starts = offsets[:-1] - offsets[0]
    values = np.zeros(int(lengths.sum()), dtype=np.float32)
    for rows, part in parts:
        index = np.asarray(rows, dtype=np.int64)
        values[_spread(starts[index], lengths[index])] = part
    prompt_lengths = np.diff(_offsets(batch, "prompt_ids"))
    values[starts[(prompt_lengths == 0) & (lengths > 0)]] = 0.0
    bounds = np.append(starts, values.size).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(bounds), pa.array(values))


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a micro-batch lie in its flat tokens."""

    positions: IntArray
    prompts: IntArray
    """Where each row's prompt starts."""
    responses: IntArray
    cu_seqlens: npt.NDArray[np.int32] | None
    max_seqlen: int
    branches: tuple[tuple[int, ...], ...]
    tokens: int


def _pad(prompts: IntArray, responses: IntArray, multiple_of: int) -> _Layout:
    """Rows under each other, all as long as the longest."""
    lengths = prompts + responses
    width = _round(int(lengths.max(initial=1)), multiple_of)
    positions = np.broadcast_to(np.arange(width), (max(len(lengths), 1), width)).copy()
    starts = np.arange(len(lengths)) * width
    return _Layout(positions, starts, starts + prompts, None, width, (), int(lengths.sum()))


def _pack(prompts: IntArray, responses: IntArray, first: npt.NDArray[np.bool_], multiple_of: int) -> _Layout:
    """Rows after each other, and what is missing to `multiple_of` as one more sequence.

    A row that is not `first` uses the prompt of the row before it.
    """
    own = np.where(first, prompts, 0)
    lengths = own + responses
    total = int(lengths.sum())
    tail = _round(max(total, 1), multiple_of) - total
    starts = np.cumsum(lengths) - lengths
    heads = np.flatnonzero(first)
    family = np.cumsum(first) - 1
    # Each row is two ranges of positions: the part of the prompt it holds, and the response.
    counts = np.append(np.stack([own, responses], axis=1).reshape(-1), tail)
    positions = np.append(np.stack([np.zeros_like(prompts), prompts], axis=1).reshape(-1), 0)
    # Rows without a token take no place in cu_seqlens: attention kernels need not know empty sequences.
    sequences = np.append(np.add.reduceat(lengths, heads) if len(heads) else heads, tail)
    ends = np.cumsum(sequences[sequences > 0])
    return _Layout(
        positions=_spread(positions, counts)[None],
        prompts=starts[heads][family],
        responses=starts + own,
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        max_seqlen=int(max((prompts + responses).max(initial=0), tail)),
        branches=() if first.all() else _branches(prompts, responses, heads, tail),
        tokens=total,
    )


def _branches(prompts: IntArray, responses: IntArray, heads: IntArray, tail: int) -> tuple[tuple[int, ...], ...]:
    """What each packed sequence is made of, see `MicroBatch.branches`."""
    sequences: list[tuple[int, ...]] = []
    for start, stop in itertools.pairwise([*heads.tolist(), len(prompts)]):
        prompt, parts = int(prompts[start]), [length for length in responses[start:stop].tolist() if length]
        sequences.append((prompt, *parts) if len(parts) > 1 else (prompt + sum(parts),))
    return tuple(sequence for sequence in [*sequences, (tail,)] if sum(sequence))


def _round(tokens: int, multiple_of: int) -> int:
    """The next multiple of `multiple_of`."""
    return -(-tokens // multiple_of) * multiple_of


def _spread(starts: IntArray, lengths: IntArray) -> IntArray:
    """Every index of the ranges [start, start + length), one range after the other."""
    before = np.cumsum(lengths) - lengths
    indices: IntArray = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return indices


def _offsets(batch: Batch, name: str) -> IntArray:
    """[rows + 1] where each row of a list column starts in its values."""
    offsets: IntArray = np.asarray(batch.ragged(name).offsets, dtype=np.int64)
    return offsets


def _gather(batch: Batch, name: str, index: IntArray) -> tuple[npt.NDArray[np.generic], IntArray]:
    """The values of some rows of a list column, one row after the other, and the rows' lengths."""
    ragged = batch.ragged(name)
    offsets = np.asarray(ragged.offsets, dtype=np.int64)
    lengths = np.diff(offsets)[index]
    return ragged.values[_spread(offsets[index], lengths)], lengths


def _columns(batch: Batch, index: IntArray) -> dict[str, Tensor]:
    """The numeric columns of some rows: per-token ones flat, per-row ones as they are.

    A list column of the dataset that is no per-token column is left out; one counts as per-token by its name, or
    because all its rows are as long as their responses.
    """
    batch.check_alignment()
    lengths = np.diff(_offsets(batch, "response_ids"))
    columns: dict[str, Tensor] = {}
    for field in batch.schema:
        if field.name in STREAMED:
            continue
        if _is_number(field.type):
            columns[field.name] = _tensor(batch.numpy(field.name)[index])
        elif field.name in NOT_PER_TOKEN or not _is_number_list(field.type):
            continue
        elif np.array_equal(np.diff(_offsets(batch, field.name)), lengths):
            columns[field.name] = _tensor(_gather(batch, field.name, index)[0])
    return columns


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_number_list(kind: pa.DataType) -> bool:
    """Lists of numbers, and lists of fixed-size lists of numbers (the teacher's top-K)."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    inner = kind.value_type
    if pa.types.is_fixed_size_list(inner):
        inner = inner.value_type
    return bool(pa.types.is_integer(inner) or pa.types.is_floating(inner))


def _tensor(values: npt.NDArray[np.generic]) -> Tensor:
    """A tensor of its own memory; double precision is for the driver's statistics, the loss computes in float32."""
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float32))
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        return torch.from_numpy(values.astype(np.int64))
    return torch.from_numpy(np.array(values))
