"""Generation and training side by side over real groups, with roles that wait for each other instead of computing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolegraph.algorithms.config import GRPOConfig
from rolegraph.batch import Batch
from rolegraph.interfaces import SamplingParams
from rolegraph.telemetry import read_metrics
from rolegraph.telemetry.timeline import spans
from tests.rolegraph.sleepers import SLEEPERS, Sampler, Trainer, run_grpo

CONFIG = GRPOConfig(global_batch_size=8, num_generations=2, max_completion_length=4)


@dataclass
class Counts:
    """Generations begun, in this process."""

    begun: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass
class Settings:
    counts: Counts
    ahead: int
    """Generations that have to have begun, beside the one that is trained on, before a step ends."""


class WaitingTrainer(Trainer):
    """Ends a step when the generations that may be ahead have begun, however fast the machine is."""

    steps = 0

    def step(self, batch: Batch, **_: Any) -> dict[str, float]:  # type: ignore[override]
        self.steps += 1
        settings: Settings = self.config
        wanted = min(self.steps + settings.ahead, 4)
        with settings.counts.changed:
            assert settings.counts.changed.wait_for(lambda: settings.counts.begun >= wanted, timeout=20)
        time.sleep(0.02)
        return {"tokens": 1.0, "rows": float(len(batch))}


class CountingSampler(Sampler):
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        counts: Counts = self.config
        with counts.changed:
            counts.begun += 1
            counts.changed.notify_all()
        self.config = 0.01
        try:
            return Sampler.generate(self, prompts, sampling)
        finally:
            self.config = counts


def overlaps(folder: Path) -> list[tuple[int, int]]:
    """The pairs (step of a generation, step of the training beside it) of a timeline."""
    found = spans(folder / "timeline.json")
    calls = [[s for s in found if s["name"] == name and s["role"] != "driver"] for name in ("generate", "step")]
    return [
        (one["step"], other["step"])
        for one in calls[0]
        for other in calls[1]
        if one["start"] < other["end"] and other["start"] < one["end"]
    ]


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_the_timeline_shows_what_ran_beside_what(limit: int, tmp_path: Path) -> None:
    counts = Counts()
    await run_grpo(
        tmp_path,
        GRPOConfig(**{**vars(CONFIG), "max_staleness": limit}),
        {"train": Settings(counts, limit), "rollout": counts},
        steps=4,
        use_ray=False,
        roles={**SLEEPERS, "train": WaitingTrainer, "rollout": CountingSampler},
    )
    beside = overlaps(tmp_path)
    assert counts.begun == 4
    assert bool(beside) == (limit > 0), "in turn, no generation runs while a step does"
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["staleness/max"] for row in rows] == [float(min(n, limit)) for n in range(4)]
    calls = [s for s in spans(tmp_path / "timeline.json") if s["role"] != "driver"]
    assert {(s["role"], s["name"], s.get("rows")) for s in calls} >= {
        ("rollout", "generate", 4),
        ("orm", "score", 8),
        ("train", "step", 8),
        ("train", "send_weights", None),
        ("rollout", "receive_weights", None),
    }
    assert {s["step"] for s in calls if s["name"] == "step"} == {1, 2, 3, 4}
    assert all(0 <= row[f"idle/{role}"] <= 1 for row in rows for role in SLEEPERS)
