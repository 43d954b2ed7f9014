"""How far generation may run ahead of training: bookkeeping of weight versions, without clocks and without roles."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rolegraph.errors import StalenessError


class Staleness:
    """Admits generations so that no row is trained on that is more than `limit` weight versions old.

    A generation is started, and later taken, in that order, to be trained on. Weights are counted by the syncs that
    bring them into the engines; the staleness of a row is the version at the time when its generation is taken, less
    the version that gave its first token. Nothing is admitted before the first sync: what engines are started with may
    be older than a version number says. `limit` 0 is strictly in turn: a sync, a generation, its training.

    What must never happen: a generation is taken that has a row from weights older than `version - limit`. Three
    transitions lead there, and each is refused by StalenessError: starting a generation that would be taken too late
    (one version passes for each generation before it, so `admits` counts them), counting another version while the
    oldest generation that waits could not bear it, and taking rows that say they are older than their generation can
    be, as those of an engine that missed a sync.

    >>> staleness = Staleness(1)
    >>> staleness.synced(1)
    >>> staleness.start(), staleness.admits        # for version 1, and one more for version 2
    (None, True)
    >>> staleness.start(), staleness.admits
    (None, False)
    >>> staleness.take(oldest=1), staleness.admits  # the second generation waits for version 2
    (None, False)
    >>> staleness.synced(2), staleness.admits
    (None, True)
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"max_staleness={limit} must be 0 or more")
        self.limit = limit
        self.version = 0
        """Of the weights in the engines."""
        self._is_synced = False
        self._is_used = False
        """Whether a generation was taken since the last sync: the next one is taken after another."""
        self._started: deque[int] = deque()
        """Of the generations that wait to be taken, the version at which each was started; the oldest first."""

    @property
    def admits(self) -> bool:
        """Whether a generation that is started now will be fresh enough when it is taken."""
        return self._is_synced and len(self._started) + self._is_used <= self.limit

    def start(self) -> None:
        """A generation begins with the weights of now."""
        if not self._is_synced:
            raise StalenessError("a generation begins after the first weight sync: sync before it")
        if not self.admits:
            raise StalenessError(
                f"a generation begun with weight version {self.version} would be trained on at version "
                f"{self.version + len(self._started) + self._is_used}, and max_staleness is {self.limit}"
            )
        self._started.append(self.version)

    def synced(self, version: int) -> None:
        """The engines have these weights now."""
        if version < self.version:
            raise StalenessError(f"weight version {version} after {self.version}: versions only rise")
        if self._started and version - self._started[0] > self.limit:
            raise StalenessError(
                f"weight version {version} would leave the generation begun with version {self._started[0]} more than "
                f"max_staleness={self.limit} versions behind: it has to be trained on first"
            )
        self.version, self._is_synced, self._is_used = version, True, False

    def take(self, oldest: int | None = None) -> None:
        """The oldest generation is trained on from now on; `oldest` is the least weight version that its rows name."""
        if not self._started:
            raise StalenessError("no generation was started that could be trained on")
        begun = self._started[0]
        if oldest is not None and self.version - oldest > self.limit:
            raise StalenessError(
                f"a row has weight version {oldest}, {self.version - oldest} behind the trainer's {self.version}, and "
                f"max_staleness is {self.limit}. Its generation began with version {begun}: an engine has missed a sync"
            )
        self._started.popleft()
        self._is_used = True

    def state(self, made: int) -> dict[str, Any]:
        """For a checkpoint: the versions, and those with which the oldest `made` of the waiting generations began.

        Later ones were in progress and are forgotten.
        """
        return {"version": self.version, "is_used": self._is_used, "made": list(self._started)[:made]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; engines have other weights until the next sync, so nothing is admitted before it."""
        self.version, self._is_used, self._is_synced = int(state["version"]), bool(state["is_used"]), False
        self._started = deque(int(begun) for begun in state["made"])
