"""Settings of the process-reward roles. Light: composing and planning a config imports no model and no verifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rolegraph.rewards.config import RewardConfig
from rolegraph.rewards.steps import SEPARATOR


class PRMConfig(Protocol):
    """What every process reward needs to know."""

    @property
    def step_separator(self) -> str:
        """What stands between two steps of a response."""

    @property
    def policy(self) -> str | None:
        """Folder whose tokenizer turns response ids into text."""


def separator_problems(node: str, separator: str) -> Iterator[str]:
    """What is wrong with what stands between two steps."""
    if not separator:
        yield f'{node}.step_separator is empty: give what stands between two steps, as in "\\n\\n"'


@dataclass(frozen=True)
class FunctionPRMConfig(RewardConfig):
    """Functions of steps in worker processes: `f(steps, *, columns..., settings...)`, one list of numbers a response.

    Example:
        reward_funcs: [arithmetic_steps, my_rewards.short_steps]
        reward_weights: [1, 0.1]
    """

    node: ClassVar[str] = "prm"
    scores_steps: ClassVar[bool] = True
    never_on_gpu: ClassVar[bool] = True
    """Told to placement: the role takes no device, and cores for moments only."""

    step_separator: str = SEPARATOR
    """What stands between two steps of a response."""
    replicas: int | None = None
    """Actors, each with worker processes of its own. Null: 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Functions use no device: 0 or null."""
    cpus: float | None = None
    """Cores a replica; fractions allowed. Null: derived from the plan."""
    policy: str | None = None
    """Folder whose tokenizer turns response ids into text; null: the policy's."""

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = [*super().problems(), *separator_problems(self.node, self.step_separator)]
        if self.replicas is not None and self.ranks is not None and self.replicas != self.ranks:
            both = f"{self.node}.replicas={self.replicas} and {self.node}.ranks={self.ranks}"
            found.append(f"{both} name the same number: give one")
        if self.gpus:
            found.append(f"{self.node}.gpus={self.gpus}: functions run on CPU cores; set cpus instead")
        return found
