"""The rollout role's settings, without an engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from roles.rollout.config import VLLMRolloutConfig


def test_the_defaults_have_no_fault() -> None:
    assert VLLMRolloutConfig().problems() == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel_size": 2}, ["data_parallel_size=2", "replicas=2"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size=0", "at least 1"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5"]),
        ({"engine_kwargs": {"max_model_len": 5}}, ["engine_kwargs.max_model_len", "set `max_model_len`"]),
        ({"engine_kwargs": {"logprobs_mode": "raw_logits"}}, ["engine_kwargs.logprobs_mode"]),
    ],
)
def test_each_rule_names_the_key_and_what_to_do(settings: dict[str, Any], words: list[str]) -> None:
    [problem] = VLLMRolloutConfig(**settings).problems()
    assert all(word in problem for word in words), problem


def test_the_role_and_its_settings_import_no_engine() -> None:
    code = "import sys, roles.rollout.vllm; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
