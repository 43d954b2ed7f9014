"""Steps whose loss or gradients are not finite: the trainer skips them, and this counts them and keeps their rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.errors import BadStepsError
from rolegraph.interfaces import Metrics
from rolegraph.telemetry.samples import FINISH_S, SampleFiles

FOLDER = "bad_steps"
"""Below the run's: a file of rows for each bad step."""


class BadSteps(Hook):
    """Counts the steps that the trainer has skipped, and ends the run after so many in a row.

    Their rows, with all that was known of them, become `bad_steps/step-N.parquet`, N as in the log: tokens, rewards,
    advantages, logprobs. A teacher's columns of K numbers a token, and of hidden states, are left out.

    Args:
        most: in a row.
        use_ray: whether rows are written by workers.
    """

    def __init__(self, most: int, run_dir: Path, *, use_ray: bool) -> None:
        self.most = most
        self.folder = run_dir / FOLDER
        self.in_a_row = 0
        self.total = 0
        self._files = SampleFiles(self.folder, use_ray=use_ray)

    async def stepped(self, algorithm: Algorithm, step: Step) -> Metrics:
        """Count a step that was skipped, and begin to save its rows."""
        telemetry = algorithm.job.telemetry
        for fault in self._files.faults():
            telemetry.event(f"rows of a bad step were not saved: {fault}")
        skipped = step.metrics.get("skipped")
        if skipped is None:
            return {}  # nothing was left to train on
        if not skipped:
            self.in_a_row = 0
            return {}
        self.in_a_row += 1
        self.total += 1
        number, where = telemetry.in_log(step.number), ""
        if step.batch is not None:
            name = f"step-{number}.parquet"
            self._files.save(step.batch, name)
            where = f"; its rows: {self.folder / name}"
        telemetry.event(
            f"step {number} is bad and was skipped: its loss or gradients are not finite ({self.in_a_row} in a row, "
            f"health.max_bad_steps={self.most}){where}"
        )
        return {"bad_steps": float(self.total)}

    async def logged(self, algorithm: Algorithm, step: Step) -> None:
        """End the run after too many. Raises BadStepsError."""
        if self.in_a_row < self.most:
            return
        last = algorithm.job.telemetry.in_log(step.number)
        faults = self._files.faults(FINISH_S)
        rows = f"their rows are in {self.folder}" if not faults else f"some rows were not saved: {'; '.join(faults)}"
        raise BadStepsError(
            f"the last {self.in_a_row} steps (up to step {last}) had losses or gradients that are not finite, and "
            f"health.max_bad_steps={self.most}. Nothing of them was learnt; {rows}. A smaller train.lr, "
            "train.dtype=float32 or other rewards may help; a larger health.max_bad_steps passes over more of them"
        )

    def state(self) -> Mapping[str, Any]:
        """How many there were."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count on."""
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])
