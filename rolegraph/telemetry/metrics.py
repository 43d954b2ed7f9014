"""`metrics.jsonl`: one line a step, the record every logger, report and benchmark reads."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rolegraph.telemetry.appending import Appender

TIMING_PREFIXES = ("seconds/", "speed/", "memory/", "idle/", "time")
"""Keys that depend on the machine's mood; everything else is the same for two runs with one seed."""

EVALUATED = "eval"
"""The `stage` of a line that is no step's: an evaluation before the first step, numbered as the step before it."""


def is_timing(key: str) -> bool:
    """Whether a metric measures the machine instead of the run."""
    return key.startswith(TIMING_PREFIXES)


def plain(value: object) -> Any:
    """A value as JSON can hold it: numbers stay exact, NaN and infinities become null."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return number


class MetricsLog:
    """Appends steps to `metrics.jsonl`, line by line so that a killed run keeps what it had.

    Lines that the disk does not take are kept, told of once, and written in their order as soon as it takes them.
    Lines may be written and synced in different threads.
    """

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda text: None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._tell, self._has_told = path, tell, False
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        """Lines that are not in the file yet."""
        self._file = Appender(path)
        self.last_step: int = 0
        """The step of the last line, of an earlier part of the run or of this one; 0 where there is none."""
        self._cut(None)

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add one step; keys are sorted so that two runs can be compared as text."""
        row = {"step": step} | {key: plain(metrics[key]) for key in sorted(metrics)}
        with self._lock:
            self._waiting.append(json.dumps(row, ensure_ascii=False) + "\n")
            fault = self._write_waiting()
            self.last_step = step
        if fault is not None and not self._has_told:
            self._has_told = True
            self._tell(
                f"{self._path.name} cannot be written for now; its lines are kept until it can: {fault.strerror}"
            )

    def amend(self, metrics: Mapping[str, object]) -> None:
        """Add metrics to the line of the last step."""
        with self._lock:
            lines = self._path.read_bytes().splitlines(keepends=True)
            line = self._waiting.pop() if self._waiting else lines.pop() if lines else "{}"
            if not self._waiting:
                self._file.cut(sum(map(len, lines)))
        row = _read(line) or {}
        row.pop("step", None)
        self.write(self.last_step, {**row, **metrics})

    def sync(self) -> None:
        """Have every line on the disk, whatever happens to the machine. Raises OSError."""
        with self._lock:
            if (fault := self._write_waiting()) is not None:
                raise fault
            self._file.sync()

    def _write_waiting(self) -> OSError | None:
        while self._waiting:
            if (fault := self._file.append(self._waiting[0])) is not None:
                return fault
            del self._waiting[0]
        return None

    def go_back(self, step: int) -> None:
        """Take off the lines of later steps: they are taken again."""
        with self._lock:
            self._waiting = [line for line in self._waiting if json.loads(line).get("step", 0) <= step] if step else []
            # Before the first step there may be a line as well: an evaluation, which a new beginning takes again.
            self._cut(step)
            self.last_step = step

    def _cut(self, step: int | None) -> None:
        """Keep the whole lines up to this step, or all (null), none of which the next one would be glued to."""
        end = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            row = _read(line)
            if row is None or not line.endswith(b"\n") or (step is not None and row.get("step", 0) > step) or step == 0:
                break
            end += len(line)
            self.last_step = row.get("step", 0)
        self._file.cut(end)

    def _rows(self) -> Iterator[dict[str, Any]]:
        yield from read_metrics(self._path)
        yield from map(json.loads, self._waiting)

    def values(self, name: str, stage: str | None, last: int) -> list[float]:
        """One metric over the last so many lines of a stage (null: of all of them), as far as it was logged."""
        rows = [row for row in self._rows() if stage is None or row.get("stage") == stage][-last:]
        return [float(row[name]) for row in rows if row.get(name) is not None]

    def beginning(self, prefix: str) -> dict[int, Mapping[str, float | None]]:
        """The metrics whose names begin so, by step."""
        found: dict[int, Mapping[str, float | None]] = {}
        for row in self._rows():
            if metrics := {name: value for name, value in row.items() if name.startswith(prefix)}:
                found[row["step"]] = metrics
        return found

    def close(self) -> None:
        """Close the file; says so where lines are lost."""
        with self._lock:
            fault = None if self._file.is_closed else self._write_waiting()
            self._file.close()
        if fault is not None:
            self._tell(f"{self._path.name} lacks its last {len(self._waiting)} lines: {fault.strerror}")


def _read(line: bytes | str) -> dict[str, Any] | None:
    """The row of a line; null for a torn one."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a `metrics.jsonl`; a torn last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if (row := _read(line)) is None:
            break
        rows.append(row)
    return rows
