"""`metrics.jsonl`: one line a step, the record every logger, report and benchmark reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.results import replacing

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
    """Appends steps to `metrics.jsonl`, flushed line by line so that a killed run keeps what it had."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        earlier = read_metrics(path) if path.exists() else []
        self.last_step: int = earlier[-1].get("step", 0) if earlier else 0
        """The step of the last line, of an earlier part of the run or of this one; 0 where there is none."""
        if path.exists():
            _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add one step; keys are sorted so that two runs can be compared as text."""
        row = {"step": step} | {key: plain(metrics[key]) for key in sorted(metrics)}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        self.last_step = step

    def go_back(self, step: int) -> None:
        """Take off the lines of later steps: they are taken again."""
        self._file.close()
        # Before the first step there may be a line as well: an evaluation, which a new beginning takes again.
        lines = [row for row in read_metrics(self._path) if row.get("step", 0) <= step] if step else []
        with replacing(self._path) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
        self.last_step = step
        self._file = self._path.open("a", encoding="utf-8")

    def values(self, name: str, stage: str, last: int) -> list[float]:
        """One metric over the last so many steps of a stage, as far as it was logged."""
        rows = [row for row in read_metrics(self._path) if row.get("stage") == stage][-last:]
        return [float(row[name]) for row in rows if row.get(name) is not None]

    def beginning(self, prefix: str) -> dict[int, Mapping[str, float | None]]:
        """The metrics whose names begin so, by step."""
        found: dict[int, Mapping[str, float | None]] = {}
        for row in read_metrics(self._path):
            if metrics := {name: value for name, value in row.items() if name.startswith(prefix)}:
                found[row["step"]] = metrics
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Take off a last line without its end, which the next one would be glued to."""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a `metrics.jsonl`; a torn last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
