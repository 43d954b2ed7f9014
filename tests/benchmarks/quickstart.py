"""The quickstart on three seeds: does the policy get better, how long does it take, how much memory does it need?"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean

from rolegraph.telemetry import read_metrics
from tests.benchmarks.measure import Finished, run, show

SEEDS = (0, 1, 2)


def gain(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first and of the last fifth of the steps."""
    fifth = max(len(rewards) // 5, 1)
    return fmean(rewards[:fifth]), fmean(rewards[-fifth:])


def quickstart(seed: int, folder: Path) -> tuple[Finished, list[float]]:
    """Run it once; returns the run and the mean reward of each GRPO step."""
    command = [sys.executable, "-m", "rolegraph.cli", "run", "experiment=quickstart"]
    finished = run([*command, f"seed={seed}", f"output_dir={folder / str(seed)}"])
    rows = read_metrics(folder / str(seed) / "metrics.jsonl")
    return finished, [row["reward/mean"] for row in rows if row["stage"] == "grpo"]


def main() -> None:
    """Print a row a seed."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            finished, rewards = quickstart(seed, Path(folder))
            first, last = gain(rewards)
            rows.append((seed, len(rewards), first, last, last - first, finished.seconds, finished.peak_mib / 1024))
    header = ("seed", "steps", "reward, first fifth", "last fifth", "gain", "seconds in all", "peak GiB")
    show("quickstart (asked: a gain of 0.2 within 360 s)", header, rows)


if __name__ == "__main__":
    main()
