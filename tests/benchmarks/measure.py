"""Running a program and seeing what it takes: wall seconds, and the peak memory of all its processes together."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from rolegraph.telemetry import read_metrics

SAMPLE_EVERY_S = 0.5


@dataclass(frozen=True)
class Finished:
    """A program that ran to its end."""

    output: str
    seconds: float
    peak_mib: float
    """Most memory of the process and all its descendants at one moment: their proportional set sizes added up, so that
    shared pages count once."""


PAGE_MIB = resource.getpagesize() / 2**20


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of the processes, shared pages counted in each of them: cheap to read."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * PAGE_MIB


def proportional_mib(pids: Sequence[int]) -> float:
    """Proportional set size of the processes: the kernel walks all their pages, and holds them up meanwhile."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total / 1024


def run(command: Sequence[str], *, timeout_s: float = 1200.0, cwd: Path | None = None) -> Finished:
    """Run a program; raises with the end of its output when it fails."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    peak = most = 0.0

    def watch() -> None:
        # The dear figure only where the cheap one is about to be highest: asked for at every sample, it took a third of
        # a core from what is measured.
        nonlocal peak, most
        while process.poll() is None:
            pids = tree(process.pid)
            if (resident := resident_mib(pids)) > 1.02 * most:
                most = resident
                peak = max(peak, proportional_mib(pids))
            time.sleep(SAMPLE_EVERY_S)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(30)
        raise
    watcher.join(2 * SAMPLE_EVERY_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output[-3000:]}")
    return Finished(output, time.monotonic() - started, peak)


def median(values: Sequence[float]) -> float:
    """The middle value, 0 for none."""
    return statistics.median(values) if values else 0.0


def figures_of(run_dir: Path, phases: Sequence[str], finished: Finished) -> dict[str, float]:
    """What a run of ours says of its steps after the first: seconds by phase and in all, tokens; and of its start."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    steps = rows[1:]
    found = {phase: median([row.get(f"seconds/{phase}", 0.0) for row in steps]) for phase in phases}
    return found | {
        "step": median([row["seconds/step"] for row in steps]),
        "tokens": median([row["response_length/mean"] * row["rows"] for row in steps]),
        "first": rows[0]["time"],
        "peak_mib": finished.peak_mib,
    }


def figures_told(finished: Finished) -> dict[str, list[float]]:
    """The figures that a trainer of TRL's prints in a line of its own."""
    line = next(line for line in finished.output.splitlines() if line.startswith("FIGURES "))
    figures: dict[str, list[float]] = json.loads(line.removeprefix("FIGURES "))
    return figures


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of figures."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
