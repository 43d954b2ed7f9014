"""What hangs on the steps of an algorithm without being its loop: evaluation, checkpoints, counting faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rolegraph.batch import Batch
from rolegraph.interfaces import Metrics

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm


@dataclass(frozen=True)
class Step:
    """Where a run is: behind optimizer step `number` of one of its stages."""

    stage: str
    """The algorithm's own name for it; `warm_start` for the steps before its own."""
    number: int
    """Counted from 1 within the stage; 0 is its beginning."""
    of: int
    """Steps that the stage has in all."""
    is_main: bool = True
    """Whether the stage is what the run is for, and no warm start."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the log says of the step."""
    batch: Batch | None = field(default=None, compare=False, repr=False)
    """The rows it was taken on, told to `Hook.stepped` alone; null where there were none."""

    @property
    def is_last(self) -> bool:
        """Whether the stage ends here."""
        return self.number >= self.of


class Hook:
    """Overrides what it wants to hear of. Hooks are told one after another, in the order of `Run.hooks`."""

    async def begun(self, algorithm: Algorithm, step: Step) -> None:
        """A stage begins; in a run that goes on, perhaps in its middle."""

    async def stepped(self, algorithm: Algorithm, step: Step) -> Metrics:
        """A step was taken; what is returned joins its line in the log."""
        return {}

    async def logged(self, algorithm: Algorithm, step: Step) -> None:
        """The line of a step is in the log."""

    async def ended(self, algorithm: Algorithm) -> None:
        """The last step of the run was taken, and all actors are still there."""

    async def broken_off(self) -> None:
        """The run ends by an error, or has lost its trainer and goes on with new hooks: end what is under way."""

    def state(self) -> Mapping[str, Any]:
        """What it needs to go on from a checkpoint, as JSON has it; kept under its class's name."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; a run that goes on calls it before `begun`, and not where it gave nothing."""
