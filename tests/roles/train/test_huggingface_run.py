"""A whole run whose trainer is transformers: vLLM gets its weights, and a checkpoint is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import SMALL, run


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_vllm_draws_from_what_two_ranks_train(tmp_path: Path) -> None:
    settings = (
        "experiment=quickstart",
        "train=huggingface",
        "train.ranks=2",
        "train.max_tokens_per_micro_batch=1024",
        "algorithm.warm_start.max_steps=2",
        "algorithm.beta=0.01",
        "rollout.dtype=float32",
        "checkpoint.every=1",
        *SMALL,
    )
    done = run(*settings, "max_steps=2", folder=tmp_path)
    steps = [row for row in done.metrics if row["stage"] == "grpo"]
    assert [row["weight_version"] for row in steps] == [1, 2]
    assert all(row["rollout_logprob_difference/max"] < 1e-4 for row in steps)
    assert steps[0]["kl"] == 0.0
