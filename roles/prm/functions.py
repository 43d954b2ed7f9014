"""Process rewards by functions, in the worker processes that reward functions have too."""

from __future__ import annotations

from typing import ClassVar

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError
from rolegraph.interfaces import Metrics
from rolegraph.rewards.pool import Scores, VerifierPool
from rolegraph.role import endpoint
from roles.prm.base import StepPRM, StepScores, wrong_count
from roles.prm.config import FunctionPRMConfig
from roles.reward.reading import prompts_of, texts_of, uids_of


class FunctionPRM(StepPRM):
    """Scores steps with the functions of `prm.reward_funcs`; a step's score is their weighted sum.

    A step that one of them gave none for has none: sums over different functions do not compare.
    """

    Config: ClassVar[type[FunctionPRMConfig]] = FunctionPRMConfig
    queue_rows: ClassVar[int] = 128

    config: FunctionPRMConfig

    def setup(self) -> None:
        """Start the workers. Raises RewardError for a function that cannot be loaded."""
        super().setup()
        self._pool = VerifierPool(self.config, workers=self.context.threads)
        self._pool.start()

    def teardown(self) -> None:
        """End the worker processes."""
        if hasattr(self, "_pool"):
            self._pool.close()

    def step_scores(self, steps: list[list[str]], batch: Batch) -> list[StepScores]:
        """Raises AlignmentError, naming the uid, where a function gives another number of scores than steps."""
        given = ["completions", "prompts", *batch.column_names]
        wanted = self._pool.wanted(list(dict.fromkeys(given)))
        columns = {name: batch[name].to_pylist() for name in wanted if name in batch}
        if "completions" in wanted:
            columns["completions"] = texts_of(batch, self._decode)
        if "prompts" in wanted:
            columns["prompts"] = prompts_of(batch, self._decode)
        found = self._pool.score(steps, columns)
        uids = uids_of(batch)
        return [self._summed(row, uids[row], of_row, found) for row, of_row in enumerate(steps)]

    @endpoint(lane="control")
    def metrics(self) -> Metrics:
        """Also `faults/NAME/REASON`, the rows that function NAME gave no score for."""
        faults = {f"faults/{name}/{reason}": float(count) for (name, reason), count in self._pool.faults().items()}
        return {**StepPRM.metrics(self), **faults}

    def _summed(self, row: int, uid: str, steps: list[str], found: dict[str, Scores]) -> StepScores:
        """The weighted sum of what the functions gave for one response."""
        reasons = [f"{name}: {scores.reasons[row]}" for name, scores in found.items() if scores.reasons[row]]
        total: list[float | None] = [0.0] * len(steps)
        for spec in self._pool.functions:
            given = found[spec.name].steps[row]
            if not given and found[spec.name].reasons[row]:
                given = [None] * len(steps)
            if len(given) != len(steps):
                raise AlignmentError(wrong_count(f"{self.context.role} function {spec.name}", uid, len(given), steps))
            total = [
                None if value is None or so_far is None else so_far + spec.weight * value
                for so_far, value in zip(total, given, strict=True)
            ]
        return StepScores(total, "; ".join(reasons) or None)
