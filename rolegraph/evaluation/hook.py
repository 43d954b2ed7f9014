"""When a run is evaluated, where the results go, and what a person is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.checkpoints.stopping import StopRequest
from rolegraph.evaluation.evaluator import Evaluator
from rolegraph.interfaces import Metrics
from rolegraph.telemetry.progress import figure

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm

TOLD = ("loss", "pass@", "mean@", "reward/mean", "response_length/mean", "response_length/truncated")
"""How the names of metrics begin that the table at the end has."""


class EvalHook(Hook):
    """Evaluates before the first step of the main stage, after every `every` of its steps, and after the last one.

    Args:
        every: null: before the first step alone.
        stop: a run that is asked to end by a signal leaves the evaluation that is due to the one that goes on.
    """

    def __init__(self, evaluator: Evaluator, every: int | None, stop: StopRequest | None = None) -> None:
        self.evaluator = evaluator
        self.history: dict[int, Mapping[str, Any]] = {}
        """All metrics by step, those of an earlier part of the run too."""
        self._every, self._stop = every, stop or StopRequest()
        self._left: int | None = None
        """The step of the main stage whose evaluation was left to the run that goes on."""

    async def begun(self, algorithm: Algorithm, step: Step) -> None:
        """Evaluate what the main stage begins with, or what was left undone where the run goes on."""
        telemetry = algorithm.job.telemetry
        if not step.is_main:
            return
        self.history = telemetry.logged("eval/")
        left, self._left = self._left, None
        if step.number and left == step.number:
            metrics = await self._evaluate(algorithm, left)
            telemetry.evaluated_late(metrics)
            algorithm.at = replace(step, metrics={**step.metrics, **metrics})
        if step.number or telemetry.in_log(0) in self.history:
            return
        telemetry.evaluated(await self._evaluate(algorithm, 0))

    async def stepped(self, algorithm: Algorithm, step: Step) -> Metrics:
        """Evaluate where the step is due."""
        due = self._every is not None and (step.number % self._every == 0 or step.is_last)
        if not step.is_main or not due:
            return {}
        if self._stop.asked and not step.is_last:  # behind the last one nothing goes on
            self._left = step.number
            return {}
        return await self._evaluate(algorithm, step.number)

    def state(self) -> Mapping[str, Any]:
        """The evaluation that was left undone."""
        return {} if self._left is None else {"left": self._left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know of it."""
        self._left = int(state["left"])

    async def ended(self, algorithm: Algorithm) -> None:
        """Show the first and the last results."""
        self._tell_faults(algorithm, at_end=True)
        if self.history:
            algorithm.job.telemetry.tables([self.table()])

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """A row a set and metric, the first and the last evaluation in columns."""
        steps = sorted(self.history)
        ends = list(dict.fromkeys((steps[0], steps[-1])))
        names = dict.fromkeys(name for step in ends for name in self.history[step])
        told = [name for name in names if name.split("/", 2)[2].startswith(TOLD)]
        rows = [[name.removeprefix("eval/"), *(self.history[step].get(name) for step in ends)] for name in told]
        columns = [f"step {step}" for step in ends] if self._every is not None else ["result"]
        return ["evaluation", *columns], rows

    async def _evaluate(self, algorithm: Algorithm, number: int) -> Metrics:
        telemetry = algorithm.job.telemetry
        step = telemetry.in_log(number)
        with telemetry.evaluation():
            metrics = await self.evaluator.evaluate(algorithm, step)
        self.history[step] = metrics
        if self._every is not None:
            telemetry.event(f"evaluated after step {step}: {headline(metrics)}")
        self._tell_faults(algorithm)
        return metrics

    def _tell_faults(self, algorithm: Algorithm, *, at_end: bool = False) -> None:
        for fault in self.evaluator.faults(at_end=at_end):
            algorithm.job.telemetry.event(f"answers were not saved: {fault}")


def headline(metrics: Mapping[str, float]) -> str:
    """The metrics that sets are there for, in a line.

    >>> headline({"eval/sums/pass@1": 0.25, "eval/sums/reward/mean": 0.3, "eval/held_out/loss": 1.5})
    'sums pass@1 0.25; held_out loss 1.5'
    """
    by_set: dict[str, list[str]] = {}
    for name, value in metrics.items():
        _, of, what = name.split("/", 2)
        words = by_set.setdefault(of, [])
        if what.startswith(("loss", "pass@", "mean@")):
            words.append(f"{what} {figure(value)}")
    return "; ".join(" ".join([of, ", ".join(words)]) for of, words in by_set.items())
