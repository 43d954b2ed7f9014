"""The quickstart, shorter: the policy gets better, with figures to show for it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from tests.runs import run


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_policy_gets_better(tmp_path: Path) -> None:
    done = run("experiment=quickstart", "max_steps=30", folder=tmp_path, timeout_s=500)
    rewards = [row["reward/mean"] for row in done.metrics if row["stage"] == "grpo"]
    assert len(rewards) == 30
    first, last = fmean(rewards[:6]), fmean(rewards[-6:])
    assert last > first + 0.08, f"{first:.3f} -> {last:.3f}"


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_real_model_takes_a_step(tmp_path: Path) -> None:
    small = ("algorithm.global_batch_size=4", "algorithm.num_generations=2", "algorithm.max_completion_length=12")
    same = ("rollout.dtype=float32", "logger.samples_every=1")  # as the trainer, also where the CPU multiplies bfloat16
    done = run("experiment=grpo_smollm2", "max_steps=1", *small, *same, folder=tmp_path)
    (step,) = done.metrics
    assert step["rows"] == 4
    assert step["rollout_logprob_difference/max"] < 1e-3
    texts = pq.read_table(tmp_path / "samples" / "step-1.parquet")["response_text"].to_pylist()
    assert any(any(char.isalpha() for char in text) or text.strip().isdigit() for text in texts), texts
