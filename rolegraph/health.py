"""Who is healthy, and what becomes of what is not: bookkeeping with its clock passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How much may go wrong before the run ends."""

    max_restarts: Annotated[int, Ge(0)] = 3
    """Of a replica, of the train group: how often each is started again in a run."""
    max_bad_steps: Annotated[int, Ge(1)] = 3
    """Steps in a row whose loss or gradient is not finite, after which the run stops; each of them is skipped."""
