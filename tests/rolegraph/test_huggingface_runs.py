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


def test_transformers_trains_and_draws_in_one_process(tmp_path: Path) -> None:
    done = run(*EXACT, "train=huggingface", "use_ray=false", folder=tmp_path)
    steps = [row for row in done.metrics if row["stage"] == "grpo"]
    assert len(steps) == 4
    assert max(row["rollout_logprob_difference/max"] or 0.0 for row in steps) < 1e-4
    losses = [row["loss"] for row in done.metrics if row["stage"] == "warm_start"]
    assert losses[-1] < losses[0] - 1
    versions = {row["weight_version"] for row in steps if "weight_version" in row}
    assert len(versions) in (0, 2), "a sync before each generation"


def test_one_process_without_ray_computes_what_actors_that_take_turns_do(tmp_path: Path) -> None:
    one = run(*EXACT, "use_ray=false", folder=tmp_path / "one")
    two = run(*EXACT, *ASLEEP, folder=tmp_path / "two")
    assert one.figures == two.figures
    steps = [row for row in one.metrics if row["stage"] == "grpo"]
    assert len(steps) == 4
    fresh = [row["rollout_logprob_difference/max"] for row in steps]
    assert max(value for value in fresh if value is not None) < 1e-4
    assert any(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in steps), "something to learn from"
