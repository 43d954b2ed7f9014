"""Rollouts that are not vLLM's, in a config: lengths, devices, one process, and what a plan makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolegraph.config import load
from rolegraph.config.rules import settle
from rolegraph.errors import ConfigError
from rolegraph.estimate import estimate
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import GIB, cluster
from roles.rollout.huggingface_config import HuggingFaceRolloutConfig
from tests.rolegraph.config.conftest import Folder
from tests.rolegraph.test_estimate import PARAMETERS, SIZES

GRPO = ("algorithm=mine", "rollout=huggingface", "model=tiny")


def config_of(folder: Folder, *overrides: str) -> HuggingFaceRolloutConfig:
    config = load([*GRPO, *overrides], config_dir=str(folder)).run.roles["rollout"].config
    assert isinstance(config, HuggingFaceRolloutConfig)
    return config


def refused(folder: Folder, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([*GRPO, *overrides], config_dir=str(folder))
    return str(caught.value)


def test_lengths_follow_from_the_run(user: Folder) -> None:
    lengths = ("data.max_length=100", "algorithm.max_completion_length=28")
    assert config_of(user, *lengths).max_model_len == 128
    assert "rollout.max_model_len=90 is less than" in refused(user, *lengths, "rollout.max_model_len=90")
    assert "rollout.max_model_len=5000 is more than the 4096 positions" in refused(user, "rollout.max_model_len=5000")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_num_seqs=0", "rollout.max_num_seqs=0 must be at least 1"),
        ("rollout.kv_cache_bytes=0", "rollout.kv_cache_bytes=0 must be at least 1"),
        ("rollout.max_model_len=0", "rollout.max_model_len=0 must be at least 1"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization=1.5 must be a share of the device"),
        ("rollout.cache=paged", "rollout.cache"),
        ("rollout.engine_kwargs={}", "rollout.engine_kwargs: unknown key"),
    ],
)
def test_values_that_cannot_be_are_named(user: Folder, override: str, words: str) -> None:
    assert words in refused(user, override)


def test_what_a_plan_needs_of_a_gpu(user: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    words = [*GRPO[:2], "model=hf", f"model.path={tmp_path}", "placement=separate", "orm=functions", "rollout.gpus=2"]
    run = load(
        [*words, "train.gpus=2", "data.max_length=1000", "algorithm.max_completion_length=24"], config_dir=str(user)
    ).run
    inventory = cluster("1x4xH100-80G")
    placed = plan(inventory, requests(run.roles), run.placement)
    assert [len(slot.device_ids) for slot in placed.roles["rollout"]] == [1, 1]
    assert settle(run, placed).roles["rollout"].config.gpu_memory_utilization == 0.9
    (need,) = [need for need in estimate(run, placed, inventory).needs if need.roles == ("rollout",)]
    uses = {use.part: use.bytes for use in need.phases[0].uses}
    vocabulary = -151_936 % 64 * 4096 * 2 * 2
    assert uses["weights"] == 2 * PARAMETERS + vocabulary
    # 256 sequences need 36 GiB: less than the 72 that are its share, which vLLM would fill.
    assert uses["kv_cache"] == 256 * 1024 * 2 * 2 * 36 * 8 * 128
    assert sum(uses.values()) < 0.9 * 80 * GIB


def test_one_process_can_hold_it_beside_a_trainer(user: Folder) -> None:
    assert config_of(user, "use_ray=false").replicas is None
    assert "rollout.replicas=2 needs processes of its own, and use_ray is false" in refused(
        user, "use_ray=false", "rollout.replicas=2"
    )
