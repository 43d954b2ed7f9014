"""What a step costs where generation runs ahead of training: the slower side, and hardly more.

Roles that sleep stand for engines on devices of their own, so that the figures are those of the machinery alone. The
plain alternative is the same run strictly in turn, which costs the sum of both sides. Run it as
`python -m tests.benchmarks overlap`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from rolegraph.algorithms.config import GRPOConfig
from rolegraph.telemetry import read_metrics
from tests.benchmarks.measure import median, show
from tests.rolegraph.sleepers import run_grpo

CASES = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0))
"""Seconds of a generation, and of a training step."""
STEPS = 6
GOAL = 1.05


def seconds_a_step(generate_s: float, train_s: float, staleness: int) -> tuple[float, float, float]:
    """Median seconds of a step in the middle of a run, and the idle shares of train and rollout."""
    config = GRPOConfig(global_batch_size=16, num_generations=4, max_completion_length=4, max_staleness=staleness)
    settings = {"train": train_s, "rollout": generate_s}
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_grpo(Path(folder), config, settings, steps=STEPS, use_ray=True))
        rows = read_metrics(Path(folder) / "metrics.jsonl")[2:-1]
    keys = ("seconds/step", "idle/train", "idle/rollout")
    step, train, rollout = (median([row[key] for row in rows]) for key in keys)
    return step, train, rollout


def main() -> None:
    """Print the table."""
    lines = []
    for generate_s, train_s in CASES:
        for staleness in (0, 1):
            step, train, rollout = seconds_a_step(generate_s, train_s, staleness)
            slower = max(generate_s, train_s)
            goal = f"<= {GOAL}" if staleness else "-"
            sides = f"{generate_s:g} + {train_s:g}"
            lines.append(
                (sides, staleness, f"{step:.3f}", f"{step / slower:.3f}", goal, f"{train:.0%}", f"{rollout:.0%}")
            )
    header = (
        "s to generate + to train",
        "max_staleness",
        "s a step",
        "/ slower side",
        "goal",
        "train idle",
        "rollout idle",
    )
    show("A GRPO step of roles that sleep", header, lines)


if __name__ == "__main__":
    main()
