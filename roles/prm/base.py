"""What all process rewards do alike: responses to steps, steps to tokens, scores to columns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError
from rolegraph.interfaces import Metrics, PRMRole, StepReduce
from rolegraph.rewards.steps import reduce_steps, split_steps, step_ends
from rolegraph.role import RoleContext, endpoint
from roles.prm.config import PRMConfig
from roles.reward.reading import policy_decoder, texts_of, uids_of


@dataclass(frozen=True)
class StepScores:
    """The scores of one response's steps, and why some or all of them are missing."""

    scores: Sequence[float | None]
    fault: str | None = None

    @classmethod
    def none(cls, steps: Sequence[str], fault: str) -> StepScores:
        """A response whose steps could not be scored."""
        return cls([None] * len(steps), fault)


class StepPRM(PRMRole):
    """A process reward; subclasses say what the steps of some responses are worth."""

    config: PRMConfig

    def __init__(self, config: PRMConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._rows = 0
        self._faults = 0
        self._lock = threading.Lock()

    def setup(self) -> None:
        """Load the tokenizer that turns response ids into text."""
        self._decode = policy_decoder(self.context.role, self.config.policy)

    def step_scores(self, steps: list[list[str]], batch: Batch) -> list[StepScores]:
        """The scores of each row's steps, of which every row here has some."""
        raise NotImplementedError

    @endpoint(dispatch="queue")
    def score(self, batch: Batch, *, reduce: StepReduce = "min") -> Batch:
        """See `PRMRole.score`."""
        texts = texts_of(batch, self._decode)
        steps = [split_steps(text or "", self.config.step_separator) for text in texts]
        found = [StepScores.none([], "no response" if text is None else "no steps") for text in texts]
        rows = [row for row, of_row in enumerate(steps) if of_row]
        if rows:
            given = self.step_scores([steps[row] for row in rows], batch.take(rows))
            for row, scores in zip(rows, given, strict=True):
                found[row] = scores
        self._check_counts(batch, steps, found)
        columns = _columns(found, reduce)
        self._count(columns["prm_fault"].to_pylist())
        if "response_ids" in batch:
            columns["step_ends"] = pa.array(self._ends(batch, texts), pa.list_(pa.int32()))
        if "response_text" not in batch:
            columns["response_text"] = pa.array(texts, pa.string())
        return batch.with_columns(columns)

    @endpoint(lane="control")
    def metrics(self) -> Metrics:
        """Rows scored so far, and of them `faults`, those without a score."""
        with self._lock:
            return {"rows": float(self._rows), "faults": float(self._faults)}

    def _ends(self, batch: Batch, texts: Sequence[str | None]) -> list[list[int]]:
        ids = [row or [] for row in batch["response_ids"].to_pylist()]
        filled = [text or "" for text in texts]
        return step_ends(ids, filled, self._decode, self.config.step_separator, uids_of(batch))

    def _check_counts(self, batch: Batch, steps: list[list[str]], found: list[StepScores]) -> None:
        for row, (of_row, scores) in enumerate(zip(steps, found, strict=True)):
            if len(scores.scores) != len(of_row):
                raise AlignmentError(wrong_count(self.context.role, uids_of(batch)[row], len(scores.scores), of_row))

    def _count(self, faults: Sequence[str | None]) -> None:
        with self._lock:
            self._rows += len(faults)
            self._faults += sum(fault is not None for fault in faults)


def wrong_count(who: str, uid: str, scores: int, steps: Sequence[str]) -> str:
    """The message for a response with another number of scores than steps."""
    return (
        f"row {uid}: {who} gave {scores} scores for {len(steps)} steps (the first begins {steps[0][:40]!r}); a score "
        "is about one step, so there is one for each"
    )


def _columns(found: Sequence[StepScores], reduce: StepReduce) -> dict[str, Any]:
    reduced = [reduce_steps(scores.scores, reduce) for scores in found]
    faults = [
        (scores.fault or "a step has no score") if value is None else None
        for scores, value in zip(found, reduced, strict=True)
    ]
    return {
        "step_scores": pa.array([list(scores.scores) for scores in found], pa.list_(pa.float64())),
        "prm_score": pa.array(reduced, pa.float64()),
        "prm_fault": pa.array(faults, pa.string()),
    }
