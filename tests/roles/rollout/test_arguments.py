"""What is refused before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolegraph.errors import ConfigError
from rolegraph.role import RoleContext
from roles.rollout.arguments import _cpu_values, worker_threads
from roles.rollout.config import VLLMRolloutConfig
from roles.teacher.config import VLLMTeacherConfig


def test_a_mixture_of_experts_is_refused_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(ConfigError, match="mixture of experts"):
        _cpu_values(VLLMRolloutConfig(model=str(tmp_path)))


def test_experts_are_fine_where_weights_stay(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4, **sizes}))
    teacher = VLLMTeacherConfig(model=str(tmp_path), max_model_len=64, dtype="float32")
    assert _cpu_values(teacher)["max_num_batched_tokens"] >= 64


@pytest.mark.parametrize(("model", "threads"), [({"hidden_size": 128}, 1), ({"hidden_size": 576}, 4), ({}, 4)])
def test_a_narrow_model_decodes_on_one_thread(model: dict[str, int], threads: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **model}))
    config = VLLMRolloutConfig(model=str(tmp_path), tensor_parallel_size=2)
    assert worker_threads(config, RoleContext(role="rollout", device="cpu", threads=8)) == threads
