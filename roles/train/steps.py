"""The scored steps of a rank's rows as tensors: what a loss with rewards of single steps reads."""

from __future__ import annotations

import numpy as np
import torch

from rolegraph.batch import Batch
from rolegraph.columns import list_lengths
from rolegraph.errors import AlignmentError
from rolegraph.losses.types import Steps

COLUMNS = ("step_scores", "step_ends")


def steps_of(batch: Batch) -> Steps | None:
    """The steps of all rows of a local batch; null where it has none. A row without scores has no steps.

    Raises AlignmentError, with the uid, where the ends of a row's steps do not fit its scores or its response.
    """
    if any(name not in batch for name in COLUMNS):
        return None
    lengths = np.maximum(list_lengths(batch["response_ids"]), 0)
    count = np.maximum(list_lengths(batch["step_scores"]), 0)
    scores = batch["step_scores"].flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    ends, first = batch.lists("step_ends"), np.cumsum(lengths) - lengths
    last = [np.zeros(0, np.int64)]
    for row in np.flatnonzero(count):
        mine = ends[row].astype(np.int64)
        if fault := _fault(mine, int(count[row]), int(lengths[row])):
            uid = batch["uid"][int(row)].as_py() if "uid" in batch else row
            raise AlignmentError(f"row {uid}: {fault}")
        before = np.concatenate([[0], mine[:-1]])
        last.append(np.where(mine > before, first[row] + mine - 1, -1))
    return Steps(
        scores=torch.from_numpy(scores),
        row=torch.from_numpy(np.repeat(np.arange(len(batch)), count)),
        last=torch.from_numpy(np.concatenate(last)),
    )


def _fault(ends: np.ndarray[tuple[int], np.dtype[np.int64]], scores: int, length: int) -> str:
    """What is wrong with the ends of a row's steps; empty where nothing is."""
    if len(ends) != scores:
        return f"step_ends has {len(ends)} entries for {scores} step_scores; each step has one of both"
    if ends[-1] != length:
        return f"step_ends ends at token {ends[-1]} of {length} response tokens; the last step ends with the response"
    if ends[0] < 0 or np.any(np.diff(ends) < 0):
        return f"step_ends {ends.tolist()} go back; each step ends behind the one before it"
    return ""
