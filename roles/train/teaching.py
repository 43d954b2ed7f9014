"""Teaching and being taught: whose prompt a teacher reads, columns of its scores, its head and states on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from rolegraph.batch import Batch
from rolegraph.columns import Ragged, from_fixed_size_rows, to_array
from rolegraph.errors import AlignmentError, RoleGraphError
from rolegraph.interfaces import HeadInfo
from rolegraph.losses.heads import Head
from roles.train.scoring import TokenScores


def seen_by_teacher(batch: Batch, vocab_size: int | None = None) -> Batch:
    """The rows as the teacher reads them: `prompt_ids` are its own where a row brings `teacher_prompt_ids`.

    Raises RoleGraphError, naming the uid, for a token that its vocabulary does not have (null: who reads them checks).
    """
    rows = batch.select([name for name in ("uid", "prompt_ids", "response_ids") if name in batch])
    if "teacher_prompt_ids" in batch:
        own = batch["teacher_prompt_ids"]
        prompts = pc.coalesce(own, batch["prompt_ids"].cast(own.type))
        rows = rows.with_columns({"prompt_ids": prompts})
    if vocab_size is None:
        return rows
    for name in ("prompt_ids", "response_ids"):
        ids = rows.ragged(name)
        if len(ids.values) and int(ids.values.max()) >= vocab_size:
            first = int(np.argmax(ids.values >= vocab_size))
            row = int(np.searchsorted(ids.offsets, first, side="right")) - 1
            raise RoleGraphError(
                f"row {rows['uid'][row].as_py() if 'uid' in rows else row}: token {int(ids.values[first])} in {name} "
                f"is beyond the teacher's vocabulary of {vocab_size}: choose a teacher that has every token of the "
                "policy"
            )
    return rows


def score_columns(batch: Batch, parts: Sequence[tuple[Sequence[int], TokenScores]]) -> Batch:
    """The scores of micro-batches, each with the rows it was of, as columns in the row order of `batch`."""
    lengths = batch.ragged("response_ids").lengths.astype(np.int64)
    order = np.concatenate([np.asarray(rows, np.int64) for rows, _ in parts]) if parts else np.zeros(0, np.int64)
    # The flat position of each row's tokens among the parts, then of every token in row order.
    starts = np.empty(len(lengths), np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    before = np.cumsum(lengths) - lengths
    index = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {}
    for name in ("token_logprobs", "ids", "logprobs", "hidden"):
        tensors = [getattr(scores, name) for _, scores in parts]
        if tensors and tensors[0] is not None:
            flat = np.concatenate([as_numpy(tensor) for tensor in tensors])
            columns[f"teacher_{name}"] = to_array(name, Ragged(flat[index], offsets))
    return Batch.from_columns(columns)


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor's values; bfloat16, which numpy does not know, as uint16 of the same bits."""
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_tensor(values: npt.NDArray[Any], dtype: str) -> Tensor:
    """A copy of what `as_numpy` gave; `dtype` is a `HeadInfo`'s."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class TeacherHead(NamedTuple):
    """A teacher's output head, or a rank's rows of it, ready to be compared with."""

    head: Head
    info: HeadInfo


def teacher_head(rows: Batch, info: HeadInfo, first: int, device: torch.device) -> TeacherHead:
    """The rows of a head from token `first` on, as `TeacherRole.head` gave them; perhaps none."""
    weight = as_tensor(from_fixed_size_rows(rows["weight"]), info.dtype).reshape(-1, info.hidden_size)
    bias = torch.from_numpy(np.array(rows.numpy("bias"))).to(device) if "bias" in rows else None
    columns = min(len(weight), max(info.vocab_size - first, 0))
    return TeacherHead(Head(weight.to(device), bias, info.scale, info.soft_cap, first, columns), info)


def teacher_states(rows: Batch, info: HeadInfo) -> Tensor:
    """[tokens, h] the column `teacher_hidden` of some rows.

    Raises AlignmentError, naming the uid, where a row has another number of states than response tokens.
    """
    states, responses = rows.ragged("teacher_hidden"), rows.ragged("response_ids")
    wrong = np.flatnonzero(states.lengths != responses.lengths)
    if len(wrong):
        row = int(wrong[0])
        raise AlignmentError(
            f"row {rows['uid'][row].as_py() if 'uid' in rows else row}: the teacher gave {states.lengths[row]} hidden "
            f"states for {responses.lengths[row]} response tokens"
        )
    return as_tensor(states.values, info.dtype).reshape(-1, info.hidden_size)
