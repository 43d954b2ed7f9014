"""Ending a run by a signal, with a checkpoint: the first one asks for it, a second one ends the run at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

from rolegraph.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether the run was asked to stop, once `listen` has been called."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def listen(self, say: Callable[[str], None]) -> None:
        """Take SIGTERM and Ctrl-C from here on, until one comes or `restore` is called.

        Main thread only, elsewhere nothing happens. What a shell lets the process ignore stays ignored.
        """
        if self._before or self.asked or threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()

        def take(number: int, _: object) -> None:
            self.signal = signal.Signals(number)
            self.restore()  # the next one does what it did before
            loop.call_soon_threadsafe(
                say,
                f"{self.signal.name}: the run stops behind this step, with a checkpoint; once more stops it at once",
            )

        for each in SIGNALS:
            if (before := signal.getsignal(each)) is not signal.SIG_IGN:
                self._before[each] = before
                signal.signal(each, take)

    def restore(self) -> None:
        """Signals do again what they did before."""
        before, self._before = self._before, {}
        for each, handler in before.items():
            signal.signal(each, handler)

    def error(self, step: int | None) -> StoppedError:
        """What ends the run; `step` is that of the checkpoint, null where it could not be written."""
        assert self.signal is not None
        kept = f"go on behind step {step} with resume=auto" if step is not None else "its checkpoint was not written"
        return StoppedError(f"stopped by {self.signal.name}: {kept}", self.signal)
