"""Rules on adapters: between what is trained, what engines have room for, and what sleep leaves of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolegraph.config import load
from rolegraph.config.rules import settle
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from tests.rolegraph.config.conftest import Folder
from tests.rolegraph.config.test_check import faults

LORA = "train.tuner_type=lora"
ALONE = "rollout.enable_lora=true"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.lora_rank=8"], "train.lora_rank has no effect with train.tuner_type=full: set train.tuner_type=lora"),
        ([LORA, "train.lora_targets=[q_prj]"], "did you mean q_proj?"),
        ([ALONE], "rollout.enable_lora=true waits for adapters, and none are trained: set train.tuner_type=lora"),
        (["rollout.max_lora_rank=8"], "rollout.max_lora_rank has no effect: set rollout.enable_lora=true"),
        (
            [LORA, ALONE, "train.lora_rank=9", "rollout.max_lora_rank=9"],
            "rollout.max_lora_rank=9 is none of vLLM's sizes: 1, 8, 16",
        ),
        (
            [LORA, ALONE, "train.lora_rank=17", "rollout.max_lora_rank=16"],
            "train.lora_rank=17 is more than the 16 that the engine has room for: lower it, or raise "
            "rollout.max_lora_rank to 32",
        ),
        ([LORA, ALONE, "train.lora_rank=513"], "train.lora_rank=513 is more than the 512"),
        (
            [LORA, ALONE, "placement=colocate", "placement.sleep_level=2"],
            "placement.sleep_level=2 drops weights of the engine that no sync brings back",
        ),
        ([LORA, "+rollout.engine_kwargs.enable_lora=true"], "engine_kwargs.enable_lora: set `enable_lora` of the role"),
    ],
)
def test_refusals(user: Folder, overrides: list[str], expected: str) -> None:
    message = faults(user, *overrides)
    assert expected in message
    assert message.startswith("the config has 1 fault:"), message


def test_experts_have_no_adapters(user: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    assert "train.tuner_type=lora: the model has 8 experts" in faults(
        user, LORA, "model.maker=null", f"model.path={tmp_path}"
    )


@pytest.mark.parametrize(("rank", "room"), [(4, 8), (16, 16), (33, 64)])
def test_an_engine_has_room_for_the_rank_that_is_trained(user: Folder, rank: int, room: int) -> None:
    run = load(["algorithm=mine", LORA, ALONE, f"train.lora_rank={rank}"], config_dir=str(user)).run
    placed = plan(cluster("1xcpu8"), requests(run.roles), run.placement)
    assert settle(run, placed).roles["rollout"].config.max_lora_rank == room
