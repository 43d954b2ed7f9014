"""Whole runs whose engines are transformers', as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import SMALL, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXACT = (
    "algorithm=grpo",
    "model=tiny",
    "rollout=huggingface",
    "deterministic=true",
    "max_steps=4",
    "algorithm.num_iterations=2",
    "algorithm.warm_start={max_steps: 8, lr: 3e-3}",
    "train.lr=3e-3",
    *SMALL,
)
ASLEEP = ("placement.sleep_level=2", "placement.offload_model=true", "placement.offload_optimizer=true")


def test_one_process_without_ray_computes_what_actors_that_take_turns_do(tmp_path: Path) -> None:
    one = run(*EXACT, "use_ray=false", folder=tmp_path / "one")
    two = run(*EXACT, *ASLEEP, folder=tmp_path / "two")
    assert one.figures == two.figures
    steps = [row for row in one.metrics if row["stage"] == "grpo"]
    assert len(steps) == 4
    fresh = [row["rollout_logprob_difference/max"] for row in steps]
    assert max(value for value in fresh if value is not None) < 1e-4
    assert any(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in steps), "something to learn from"
