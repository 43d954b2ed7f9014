"""What every teacher does with its rows: whose prompt it reads, and columns of what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from rolegraph.batch import Batch
from rolegraph.columns import Ragged, to_array
from roles.teacher.scoring import TokenScores


def seen_by_teacher(batch: Batch) -> Batch:
    """The rows as the teacher reads them: `prompt_ids` are its own where a row brings `teacher_prompt_ids`."""
    rows = batch.select([name for name in ("uid", "prompt_ids", "response_ids") if name in batch])
    if "teacher_prompt_ids" not in batch:
        return rows
    own = batch["teacher_prompt_ids"]
    prompts = pc.coalesce(own, batch["prompt_ids"].cast(own.type))
    return rows.with_columns({"prompt_ids": prompts})


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
