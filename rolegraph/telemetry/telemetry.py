"""The one object a run reports to; it passes on to the log, trackers, timeline, display and sample files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rolegraph.batch import Batch
from rolegraph.telemetry.loggers import Tracker, open_trackers
from rolegraph.telemetry.metrics import EVALUATED, MetricsLog, plain
from rolegraph.telemetry.progress import Progress, duration, figure
from rolegraph.telemetry.samples import FINISH_S, SampleFiles
from rolegraph.telemetry.tables import as_text
from rolegraph.telemetry.timeline import Timeline


class Telemetry:
    """Metrics, phases and samples of one run; in the folder of an earlier part of it, what that one left stays.

    Phases are timed by name; the seconds of those that ended since the last step go out with the next one as
    `seconds/NAME`, and the time in which there was none as `seconds/other`: where phases follow each other, the seconds
    of a step add up. `idle/ROLE` is the share of a step in which the role's ranks had no call to work on; it and the
    speed are those of training, without the time of an evaluation.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        roles: tuple[str, ...] = (),
        loggers: Sequence[str] = (),
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        samples_every: int = 0,
        use_ray: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir = run_dir
        self._clock = clock
        self.progress = Progress(roles)
        self._log = MetricsLog(run_dir / "metrics.jsonl", self.event)
        self._trackers = open_trackers(loggers, run_dir, name, config or {})
        self._samples_every, self._sampled = samples_every, 0
        self._files = SampleFiles(run_dir / "samples", use_ray=use_ray)
        self.timeline = Timeline(run_dir / "timeline.json", clock, self.event)
        """What each rank and the driver did when; the graph reports its calls here."""
        self._started = self._last_step = clock()
        self._before = sum(self._log.values("time", None, 1))
        """Seconds that earlier parts of the run took, as far as their log says."""
        self._first_stage: tuple[float, Mapping[str, float]] | None = None
        """When the first stage began, and how busy each role had been until then."""
        self._busy: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        """What the line of the next step counts, beside its metrics."""
        self._seconds: dict[str, float] = {}
        self._phases: list[tuple[str, tuple[str, ...]]] = []
        self._covered, self._covered_since = 0.0, 0.0
        """Seconds since the last step in which there was a phase; when those that are open now began."""
        self._aside, self._busy_aside = 0.0, dict[str, float]()
        """Seconds since the last step that were an evaluation's, and how busy each role was in them."""
        # Steps of a run that goes on are counted on from those of its earlier part.
        self._stage, self._offset, self._total = "", 0, self._log.last_step
        self._resumed: Mapping[str, int] = {}
        self._rewards: list[float] = []

    @contextmanager
    def phase(self, name: str, *roles: str) -> Iterator[None]:
        """Time a part of the step, and show what these roles are doing meanwhile; phases may overlap."""
        start = self._clock()
        if not self._phases:
            self._covered_since = start
        this = (name, roles)
        self._phases.append(this)
        self._show(roles)
        try:
            with self.timeline.phase(name):
                yield
        finally:
            now = self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - start
            self._phases.remove(this)
            if not self._phases:
                self._covered += now - self._covered_since
            self._show(roles)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """What goes on meanwhile says nothing about how fast the run trains."""
        start, before = self._clock(), self.timeline.busy()
        try:
            yield
        finally:
            self._aside += self._clock() - start
            for role, until in self.timeline.busy().items():
                self._busy_aside[role] = self._busy_aside.get(role, 0.0) + until - before.get(role, 0.0)

    def _show(self, roles: tuple[str, ...]) -> None:
        for role in roles:
            open_phases = [name for name, of_roles in self._phases if role in of_roles]
            self.progress.doing(role, open_phases[-1] if open_phases else "idle")

    @property
    def last_step(self) -> int:
        """The last step that is in the log, counted over all stages."""
        return self._log.last_step

    def sync_log(self) -> None:
        """Have all lines of the log on the disk, from any thread. Raises OSError."""
        self._log.sync()

    def state(self) -> dict[str, int]:
        """What `go_back` has to be told, beside the step, so that files of samples are those of a run in one go."""
        return {"sampled": self._sampled}

    def go_back(self, step: int, state: Mapping[str, int] = MappingProxyType({})) -> None:
        """Forget what was logged behind a step of the run: it goes on there, with the next call of `stage`."""
        if 0 < (last := self._log.last_step) < step:
            self.event(f"metrics.jsonl ends with step {last}: the lines up to step {step} are lost")
        self._log.go_back(step)
        self._total, self._resumed = step, dict(state)

    def stage(self, name: str, steps: int, done: int = 0) -> None:
        """Begin a part of the run (a warm start, the main loop); step numbers in the log go on over stages.

        `done` of its steps were taken before, and are in the log already.
        """
        self._offset, self._stage = self._total - done, name
        self._total = self._offset + steps
        self._seconds, self._sampled = {}, self._resumed.get("sampled", 0) if done else 0
        self._rewards = self._log.values("reward/mean", name, done) if done else []
        self._begin_step(self._clock())
        self.timeline.begin_step(self._offset + done + 1)
        if self._first_stage is None:
            self._first_stage = (self._last_step, self._busy)
        self.progress.stage(name, steps, done)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step, counted from 1 within the stage."""
        now = self._clock()
        total, busy = now - self._last_step, self._busy
        trained, busy_aside = total - self._aside, self._busy_aside
        covered = self._covered + (now - self._covered_since if self._phases else 0.0)
        spent = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        spent["seconds/other"] = max(total - covered, 0.0)
        spent["seconds/step"] = total
        self._seconds = {}
        self._begin_step(now)
        self.timeline.end_step()
        if trained > 0:
            for role, until in self._busy.items():
                worked = until - busy.get(role, 0.0) - busy_aside.get(role, 0.0)
                spent[f"idle/{role}"] = max(1 - worked / trained, 0.0)
        counts, self._counts = self._counts, {}
        record: dict[str, Any] = {**metrics, **counts, **spent, "time": self._before + now - self._started}
        if "tokens" in metrics and trained > 0:
            record["speed/tokens_per_second"] = metrics["tokens"] / trained
        if "reward/mean" in metrics:
            self._rewards.append(float(metrics["reward/mean"]))
        self._log.write(self._offset + step, {**record, "stage": self._stage})
        numbers = {key: value for key, value in record.items() if isinstance(plain(value), int | float)}
        self._track(lambda tracker: tracker.log(self._offset + step, numbers))
        self.progress.step(step, numbers)

    def count(self, name: str) -> None:
        """Something has happened that the line of the next step is to count."""
        self._counts[name] = self._counts.get(name, 0.0) + 1.0

    def in_log(self, step: int) -> int:
        """The number that a step of the stage has in the log."""
        return self._offset + step

    def logged(self, prefix: str) -> dict[int, Mapping[str, float | None]]:
        """The metrics whose names begin so, by their step in the log, where there are some."""
        return self._log.beginning(prefix)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Record how good the weights are that the stage begins with: a line of its own, which is no step's."""
        now = self._clock()
        spent = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        record = {**metrics, **spent, "time": self._before + now - self._started}
        self._log.write(self._offset, {**record, "stage": EVALUATED})
        numbers = {key: value for key, value in record.items() if plain(value) is not None}
        self._track(lambda tracker: tracker.log(self._offset, numbers))
        self._seconds = {}
        self._begin_step(now)

    def evaluated_late(self, metrics: Mapping[str, float]) -> None:
        """Record how good the weights are behind the last step that is in the log, in its line."""
        seconds = {f"seconds/{name}": seconds for name, seconds in self._seconds.items() if name == "eval"}
        self._log.amend({**metrics, **seconds})
        numbers = {key: value for key, value in metrics.items() if plain(value) is not None}
        self._track(lambda tracker: tracker.log(self.last_step, numbers))
        self._seconds = {}
        self._begin_step(self._clock())

    def _begin_step(self, now: float) -> None:
        self._last_step, self._covered, self._covered_since = now, 0.0, now
        self._aside, self._busy_aside = 0.0, {}
        self._busy = self.timeline.busy()

    def samples(self, step: int, batch: Batch) -> None:
        """Keep the rows that `step` begins with as `samples/step-N.parquet`, once in so many steps as the config says.

        Rows may serve several steps, so the steps that are told here need not meet a multiple of that number.
        """
        if not self._samples_every:
            return
        due, self._sampled = step // self._samples_every > self._sampled // self._samples_every, step
        if due:
            self._files.save(batch, f"step-{self._offset + step}.parquet")
            self._tell_faults()

    def event(self, text: str) -> None:
        """Tell the person at the terminal something that stays on the screen."""
        self.progress.say(text)

    def tables(self, tables: Iterable[tuple[Sequence[str], Sequence[Sequence[Any]]]]) -> None:
        """Show tables that stay on the screen, each a header and rows."""
        self.progress.say(as_text(tables))

    def finish_samples(self) -> None:
        """Give samples that are being written a moment to be whole; to be called while the workers still run."""
        self._tell_faults(FINISH_S)

    def close(self) -> None:
        """Close files, trackers and the display, and say how busy each role was."""
        self.progress.close()
        if self.busy:
            self.event(self.busy)
        self.timeline.close()
        self._log.close()
        self._track(lambda tracker: tracker.close())

    def _track(self, tell: Callable[[Tracker], None]) -> None:
        """Tell every tracker; one that fails is told no more, for metrics.jsonl has all and the run matters more."""
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self.event(f"{type(tracker).__name__} is left out from now on: {type(error).__name__}: {error}")

    def _tell_faults(self, wait_s: float = 0.0) -> None:
        for fault in self._files.faults(wait_s):
            self.event(f"samples were not saved: {fault}")

    @property
    def gain(self) -> str:
        """What became of the reward in the current stage, as a person says it; empty for less than five of them."""
        fifth = len(self._rewards) // 5
        if not fifth:
            return ""
        first, last = fmean(self._rewards[:fifth]), fmean(self._rewards[-fifth:])
        return f"reward {figure(first)} in the first fifth of the steps, {figure(last)} in the last"

    @property
    def busy(self) -> str:
        """In which share of the time from the first stage to the last step each role had a call to work on."""
        started, before = self._first_stage or (self._last_step, {})
        seconds = self._last_step - started
        if seconds <= 0 or not self._busy:
            return ""
        shares = {role: (until - before.get(role, 0.0)) / seconds for role, until in self._busy.items()}
        return "busy: " + ", ".join(f"{role} {share:.0%}" for role, share in shares.items())

    @property
    def elapsed(self) -> str:
        """Time since the run began, as a person says it."""
        return duration(self._clock() - self._started)
