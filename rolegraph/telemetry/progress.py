"""The display of a run: step, reward, tokens a second, time left, and what each role is doing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

HEADLINE = {
    "reward/mean": "reward",
    "loss": "loss",
    "grad_norm": "grad norm",
    "response_length/mean": "length",
    "speed/tokens_per_second": "tokens/s",
    "seconds/step": "s/step",
}
"""The metrics worth a place on the line, and what a person calls them."""

LINE_EVERY_S = 5.0


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45s, 3m05s, 2h10m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def figure(value: float) -> str:
    """A number short enough to scan down a column."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Progress:
    """A live panel on a terminal; elsewhere a line every few seconds, so that logs stay readable."""

    def __init__(self, roles: tuple[str, ...], console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self._roles: dict[str, str] = dict.fromkeys(roles, "starting")
        self._stage, self._step, self._steps, self._done = "", 0, 0, 0
        self._stage_started = time.monotonic()
        self._metrics: Mapping[str, float] = {}
        self._last_line = 0.0
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
        if self.console.is_terminal:
            self._live.start()
        if roles:
            self.say(f"starting {', '.join(roles)}")

    def stage(self, name: str, steps: int, done: int = 0) -> None:
        """A new part of the run begins: `steps` steps under this name, of which `done` were taken before."""
        self._stage, self._step, self._steps, self._done = name, done, steps, done
        self._stage_started = time.monotonic()
        self._metrics = {}
        self._roles = {role: "idle" if what == "starting" else what for role, what in self._roles.items()}
        self.say(f"{name}: {steps} steps" + (f", {done} of them taken before" if done else ""))

    def doing(self, role: str, what: str) -> None:
        """What a role does from now on."""
        self._roles[role] = what

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the figures of a finished step."""
        self._step, self._metrics = step, metrics
        now = time.monotonic()
        due = step == self._steps or step == 1 or now - self._last_line >= LINE_EVERY_S
        if not self.console.is_terminal and due:
            self._last_line = now
            self.console.print(self._line(), soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Take the panel away and leave the last line."""
        if self._live.is_started:
            self._live.stop()
            if self._step:
                self.console.print(self._line(), soft_wrap=True)

    def _figures(self) -> list[str]:
        shown = {label: self._metrics.get(key) for key, label in HEADLINE.items()}
        return [f"{label} {figure(value)}" for label, value in shown.items() if value is not None]

    def _left(self) -> str:
        elapsed = time.monotonic() - self._stage_started
        taken = self._step - self._done
        if not taken:
            return ""
        return f"{duration(elapsed / taken * (self._steps - self._step))} left"

    def _line(self) -> Text:
        head = f"{self._stage} {self._step}/{self._steps}"
        return Text("  ".join([head, *self._figures(), self._left()]))

    def _render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 2))
        if self._stage:
            head = f"{self._stage} {self._step}/{self._steps}"
            bar.add_row(head, ProgressBar(self._steps or 1, self._step, width=30), self._left())
        else:
            bar.add_row(duration(time.monotonic() - self._stage_started))
        roles = Text("  ".join(f"{role}: {what}" for role, what in self._roles.items()), style="dim")
        return Group(bar, Text("  ".join(self._figures())), roles)
