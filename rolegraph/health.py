"""Who is healthy, and what becomes of what is not: bookkeeping with its clock passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import Ge

from rolegraph.errors import HealthError

BACKOFF_S = 1.0
"""Least seconds between the first restart of a unit and its second; each further one takes twice as long."""
MOST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How much may go wrong before the run ends. Roles in this process (use_ray=false) live and die with it."""

    max_restarts: Annotated[int, Ge(0)] = 3
    """Of a replica, of the train group: how often each is started again in a run."""
    max_bad_steps: Annotated[int, Ge(1)] = 3
    """Steps in a row whose loss or gradient is not finite, after which the run stops; each of them is skipped."""


class State(Enum):
    """What a unit is good for."""

    STARTING = "starting"
    """Its processes come up; no call reaches them."""
    JOINING = "joining"
    """Set up, and without what it needs to work as the others do: weights of now."""
    HEALTHY = "healthy"
    DEAD = "dead"
    """Waits to be started again."""
    GIVEN_UP = "given up"
    """Died once more than it may be started again."""


class Health:
    """Of one unit, which is started as a whole: a replica, or the ranks of a group that compute together.

    It starts, joins, and is healthy; at any time it may die, and is then started again, `max_restarts` times in all.
    Restart k begins at once where the one before it is long ago, else after a time that doubles with k.

    What must never happen, and is refused with HealthError:

    - a unit that was started again works before it has joined (an engine that draws with the weights of the start);
    - a unit that lives is started again (two processes on one seat);
    - a unit is started again too early, or more often than it may be: one that dies of its own work would take the
      machine with it;
    - a unit that was given up comes back.

    That a unit died is told by several calls at once, and told late by some: `died` of a unit that is known to be dead
    changes nothing. Whoever tells must know that it means the processes of now (`Recovery` compares them).

    >>> health = Health(max_restarts=1)
    >>> health.started(), health.joined(), health.state
    (None, None, <State.HEALTHY: 'healthy'>)
    >>> health.died(), health.wait_s(now=5.0), health.restart(now=5.0), health.state
    (None, 0.0, None, <State.STARTING: 'starting'>)
    >>> health.died(), health.state
    (None, <State.GIVEN_UP: 'given up'>)
    """

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts} must be 0 or more")
        self.max_restarts = max_restarts
        self.state = State.STARTING
        self.restarts = 0
        """How often it was started again."""
        self._last_restart: float | None = None

    @property
    def may_return(self) -> bool:
        """Whether it does not work now, and may again."""
        return self.state in (State.STARTING, State.JOINING, State.DEAD)

    def started(self) -> None:
        """Its processes are set up."""
        self._go(State.STARTING, State.JOINING, "is set up")

    def joined(self) -> None:
        """It has what the others have, and may work."""
        self._go(State.JOINING, State.HEALTHY, "joins")

    def died(self) -> None:
        """A process of it is gone."""
        if self.state not in (State.DEAD, State.GIVEN_UP):
            self.state = State.DEAD if self.restarts < self.max_restarts else State.GIVEN_UP

    def wait_s(self, now: float) -> float:
        """Seconds until a dead unit may be started again."""
        if self._last_restart is None:
            return 0.0
        backoff = min(BACKOFF_S * 2.0 ** max(self.restarts - 1, 0), MOST_BACKOFF_S)
        return max(self._last_restart + backoff - now, 0.0)

    def restart(self, now: float) -> None:
        """It is started again."""
        if self.state is State.DEAD and (wait := self.wait_s(now)):
            raise HealthError(f"a unit is started again {wait:g} s too early")
        self._go(State.DEAD, State.STARTING, "is started again")
        self.restarts += 1
        self._last_restart = now

    def withdraw(self) -> None:
        """Its restart was broken off, through no fault of its own, and does not count."""
        if self.state not in (State.STARTING, State.JOINING) or not self.restarts:
            raise HealthError(f"a unit that is {self.state.value} has no restart that could be broken off")
        self.state = State.DEAD
        self.restarts -= 1

    def _go(self, before: State, after: State, what: str) -> None:
        if self.state is not before:
            raise HealthError(f"a unit that is {self.state.value} {what}; only one that is {before.value} can")
        self.state = after
