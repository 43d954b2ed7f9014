"""`timeline.json`: who did what when, as a Chrome trace that https://ui.perfetto.dev opens.

A process a role and a thread a rank, one span an endpoint call; the driver is a process too, with its phases and steps.
The format is the JSON array of the Trace Event Format, whose end may be missing: a run that is killed leaves a file
that opens.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolegraph.telemetry.appending import Appender

DRIVER = "driver"
STEPS, PHASES = 0, 1
"""The driver's two tracks: finished steps, and the phases of the algorithm."""

LANES = 1000
"""Threads of one rank: calls that run at the same time are shown below each other."""
RANKS = 100_000
"""Ranks of one process; thread ids are unique over processes, which some readers rely on."""


@dataclass
class _Track:
    """One rank: its calls in progress by lane, and the seconds in which there was at least one."""

    name: str
    pid: int
    first_tid: int
    open: dict[int, dict[str, Any]] = field(default_factory=dict)
    named: int = 0
    """Lanes that a reader has been told the names of."""
    busy: float = 0.0
    since: float = 0.0

    def free_lane(self) -> int:
        return next(lane for lane in range(len(self.open) + 1) if lane not in self.open)


class Timeline:
    """Streams spans to a file as they end; memory holds the ones in progress alone.

    >>> timeline = Timeline(Path("timeline.json"))                        # doctest: +SKIP
    >>> ended = timeline.call("rollout", "generate", 0, 8)                # doctest: +SKIP
    >>> ended()                                                           # doctest: +SKIP

    A call lasts from the moment the driver sends it until its result is known there: time spent waiting for the actor
    counts. Calls may begin and end in any thread. A span that the disk does not take is left out,
    and that is told once.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._clock = clock
        self._tell: Callable[[str], None] | None = tell
        self._started = clock()
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, int], _Track] = {}
        self._ranks: dict[str, int] = {}
        self._step = 1
        self._step_started = self._started
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep(path)
        self._path = path
        self._file = Appender(path)
        self._begun = False
        self._owed: list[Mapping[str, Any]] = []
        """Names of processes and threads that are not written yet; spans say nothing without them."""
        self._process(DRIVER)

    def place(self, ranks: Mapping[str, int]) -> None:
        """Name the roles and how many ranks each has; one that is never called is known as idle."""
        with self._lock:
            self._ranks = dict(ranks)
            for role in ranks:
                self._process(role)

    def call(self, role: str, endpoint: str, rank: int, rows: int | None) -> Callable[[], None]:
        """A call of an endpoint begins on one rank; what is returned is to be called when it has ended."""
        args = {"role": role, "rank": rank, "endpoint": endpoint, "step": self._step}
        return self._begin(role, rank, f"rank {rank}", endpoint, args if rows is None else {**args, "rows": rows})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the driver's program."""
        ended = self._begin(DRIVER, PHASES, "phases", name, {"step": self._step})
        try:
            yield
        finally:
            ended()

    def begin_step(self, step: int) -> None:
        """From here on, spans belong to this step of the run; time since the last one belongs to none."""
        self._step, self._step_started = step, self._clock()

    def end_step(self) -> None:
        """The step is finished and the next one begins."""
        with self._lock:
            now = self._clock()
            track = self._track(DRIVER, STEPS, "steps")
            span = {"name": f"step {self._step}", "ts": self._step_started, "args": {"step": self._step}}
            self._write_span(track, 0, span, now)
            self._step, self._step_started = self._step + 1, now

    def busy(self) -> dict[str, float]:
        """Of each role, the seconds in which a rank had something to do, as the mean over its ranks, up to now."""
        with self._lock:
            now = self._clock()
            found = dict.fromkeys(self._ranks, 0.0)
            for (role, _), track in self._tracks.items():
                if role in found:
                    seconds = track.busy + (now - track.since if track.open else 0.0)
                    found[role] += seconds / self._ranks[role]
            return found

    def close(self) -> None:
        """Write what has not ended, marked so, and end the file."""
        with self._lock:
            if self._file.is_closed:
                return
            now = self._clock()
            for track in self._tracks.values():
                for lane, span in track.open.items():
                    span["args"]["unfinished"] = True
                    self._write_span(track, lane, span, now)
            self._file.append("\n]\n" if self._begun else "[\n]\n")
            self._file.close()

    def _begin(self, process: str, number: int, track_name: str, name: str, args: dict[str, Any]) -> Callable[[], None]:
        with self._lock:
            now = self._clock()
            track = self._track(process, number, track_name)
            if not track.open:
                track.since = now
            lane = track.free_lane()
            span = track.open[lane] = {"name": name, "ts": now, "args": args}

        def end() -> None:
            with self._lock:
                now = self._clock()
                del track.open[lane]
                if not track.open:
                    track.busy += now - track.since
                self._write_span(track, lane, span, now)

        return end

    def _process(self, name: str) -> int:
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            self._write({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
            self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        return self._processes[name]

    def _track(self, process: str, number: int, name: str) -> _Track:
        if (process, number) not in self._tracks:
            pid = self._process(process)
            self._tracks[process, number] = _Track(name, pid, (pid * RANKS + number) * LANES)
        return self._tracks[process, number]

    def _write_span(self, track: _Track, lane: int, span: Mapping[str, Any], end: float) -> None:
        while track.named <= lane:
            name = track.name + (f" +{track.named}" if track.named else "")
            thread = {"pid": track.pid, "tid": track.first_tid + track.named}
            self._write({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
            self._write({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}})
            track.named += 1
        start = span["ts"]
        self._write(
            {
                "ph": "X",
                "name": span["name"],
                "pid": track.pid,
                "tid": track.first_tid + lane,
                "ts": round(1e6 * (start - self._started), 1),
                "dur": round(1e6 * (end - start), 1),
                "args": span["args"],
            }
        )

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._file.is_closed:
            return
        events = [*self._owed, event]
        text = ",\n".join(json.dumps(each, ensure_ascii=False) for each in events)
        fault = self._file.append((",\n" if self._begun else "[\n") + text)
        if fault is None:
            self._begun, self._owed = True, []
            return
        self._owed += [event] if event["ph"] == "M" else []
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(f"{self._path.name} cannot be written for now, and lacks what ends meanwhile: {fault.strerror}")


def _keep(path: Path) -> None:
    """Move the timeline of the earlier part of a run that goes on to the first free `timeline-N.json`."""
    if path.exists():
        names = (path.with_name(f"{path.stem}-{part}{path.suffix}") for part in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a `timeline.json`, also of a run that was killed; a torn last line is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return events


def spans(path: Path) -> list[dict[str, Any]]:
    """The spans of a `timeline.json` with their process under `role`, in seconds: `start` and `end`."""
    events = read_timeline(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [
        {
            "role": names[event["pid"]],
            "name": event["name"],
            "start": event["ts"] / 1e6,
            "end": (event["ts"] + event["dur"]) / 1e6,
            **event["args"],
        }
        for event in events
        if event["ph"] == "X"
    ]
