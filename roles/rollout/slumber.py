"""What of an engine is awake, and whether its weights are there: the role's own account.

vLLM on a CPU frees nothing when it is told to sleep and goes on drawing samples, and on a GPU it draws them from memory
that was mapped again and never filled. So the role asks here first.
"""

from __future__ import annotations

from rolegraph.errors import TurnError

PARTS = ("weights", "kv_cache")


class Slumber:
    """The sleep of one engine, as pure state.

    What must never happen: a sample is drawn while a part is asleep, or from weights that a sleep at level 2 dropped
    and no sync has brought back since. Waking does not bring them back.
    """

    def __init__(self) -> None:
        self.asleep: tuple[str, ...] = ()
        self.is_dropped = False

    def begin(self, level: int) -> bool:
        """Fall asleep at `level`; False where nothing is to do. Dropped weights count as such from here on."""
        if level not in (0, 1, 2):
            raise ValueError(f"sleep(level={level}): use 0 (stay awake), 1 (keep the weights) or 2 (drop them)")
        if level == 0 or self.asleep == PARTS:
            return False
        self.is_dropped = self.is_dropped or level == 2
        self.asleep = PARTS
        return True

    def to_wake(self, parts: tuple[str, ...]) -> list[str]:
        """Which of `parts` are asleep; TurnError for unknown ones, and for a cache without its weights."""
        if unknown := [part for part in parts if part not in PARTS]:
            raise TurnError(f"wake_up({unknown}): an engine's parts are {', '.join(PARTS)}")
        waking = [part for part in PARTS if part in parts and part in self.asleep]
        if "kv_cache" in waking and "weights" in self.asleep and "weights" not in waking:
            raise TurnError("wake_up('kv_cache'): the weights are asleep; wake them before, or with it")
        return waking

    def woke(self, parts: list[str]) -> None:
        """These parts have their memory again."""
        self.asleep = tuple(part for part in self.asleep if part not in parts)

    def filled(self) -> None:
        """A sync has made the weights whole."""
        self.is_dropped = False

    def refuse_samples(self) -> None:
        """TurnError unless samples can be drawn."""
        if self.is_dropped:
            raise TurnError(
                "the engine's weights were dropped by sleep(level=2) and no sync has brought them back: sync before "
                "generate, or set placement.sleep_level=1, which keeps them in host memory"
            )
        if self.asleep:
            raise TurnError(
                f"the engine is asleep ({', '.join(self.asleep)}): call wake_up({self.asleep!r}) before it draws; "
                'an algorithm does so by `async with self.turn("generate")`, or its turn of another name'
            )

    def refuse_weights(self) -> None:
        """TurnError unless weights can be received."""
        if "weights" in self.asleep:
            raise TurnError(
                "the engine's weights are asleep and cannot be written: call wake_up(('weights',)) before a sync; an "
                "algorithm does so by `await self.sync()`"
            )
