"""Every error a user of rolegraph can meet, under one base class."""

from __future__ import annotations

import functools
from typing import Any


class RoleGraphError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RoleGraphError):
    """The config cannot be run as it is; the message names the key, where it came from and what to type."""


class PlanError(RoleGraphError):
    """The roles do not fit on the devices; the message shows need and have."""


class BatchError(RoleGraphError):
    """A batch was asked for something its columns or rows cannot give."""


class AlignmentError(BatchError):
    """A per-token column does not have one entry a response token; the message names the row's uid."""


class WeightSyncError(RoleGraphError):
    """Weights did not arrive, or not in the shape that was agreed."""


class CheckpointError(RoleGraphError):
    """A checkpoint could not be written, or is not whole, or does not belong to this run."""


class StoppedError(RoleGraphError):
    """A signal asked the run to stop, and it has done so in good order."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        """Its number; a shell expects the exit code 128 + signal."""


class TurnError(RoleGraphError):
    """A role was asked to work without what it needs on its device, or out of its turn."""


class BadStepsError(RoleGraphError):
    """Too many steps in a row whose loss or gradients were not finite."""


class HealthError(RoleGraphError):
    """Something that died, or that lives, was treated as if it had not."""


class StalenessError(RoleGraphError):
    """Samples would be trained on that are more weight versions old than the config allows."""


class DataError(RoleGraphError):
    """The data source is missing, malformed or empty after filtering."""


class RewardError(RoleGraphError):
    """A reward function or the verifier pool cannot be used."""


class ServiceError(RoleGraphError):
    """A service that a role asks has gone away."""


class RoleError(RoleGraphError):
    """An endpoint failed inside an actor, or the actor died.

    The message holds the actor's own first traceback once; the attributes hold the parts of the message.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int | None = None,
        node: str = "",
        endpoint: str = "",
        remote_traceback: str = "",
        at: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.role = role
        self.rank = rank
        self.node = node
        self.endpoint = endpoint
        self.remote_traceback = remote_traceback
        self.at = at
        """When it happened, `time.time()` on its node: tells a cause from what followed it."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        node = f" on {self.node}" if self.node else ""
        endpoint = f" in {self.endpoint}()" if self.endpoint else ""
        where = f"role {self.role}{rank}{node}{endpoint}: " if self.role else ""
        trace = f"\n\nTraceback in the actor:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""
        return f"{where}{self.message}{trace}"

    def __reduce__(self) -> tuple[object, ...]:
        return (functools.partial(RoleError, **self.parts), (self.message,))

    @property
    def parts(self) -> dict[str, Any]:
        """Everything but the message, as keyword arguments of another `RoleError`."""
        return {name: getattr(self, name) for name in ("role", "rank", "node", "endpoint", "remote_traceback", "at")}
