"""Rules on what roles do while others have their turn on a shared device."""

from __future__ import annotations

import pytest

from rolegraph.config import load
from rolegraph.config.rules import settle
from rolegraph.config.turn_rules import needs_sleep_mode
from rolegraph.errors import ConfigError
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from tests.rolegraph.config.conftest import Folder
from tests.rolegraph.config.test_check import faults

JUDGED = """
# @package _global_
defaults:
  - override /train: megatron
  - override /rollout: vllm

algorithm:
  _target_: rolegraph_judged_code.Judged
judge:
  _target_: roles.rollout.vllm.VLLMRollout
placement:
  colocate_groups: [[train, rollout, judge]]
"""

APART = ["placement=separate", "algorithm=mine"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["placement.offload_model=true"], "placement.offload_model=true has no effect: no role that trains shares"),
        (["placement.offload_optimizer=true"], "placement.offload_optimizer=true has no effect"),
        (["placement.sleep_level=1"], "placement.sleep_level=1 has no effect: no engine shares its devices"),
        # The verifier takes no device.
        (["placement.colocate_groups=[[train,orm]]", "placement.offload_model=true"], "offload_model=true has no eff"),
        (["placement.colocate_groups=[[rollout,orm]]", "placement.sleep_level=2"], "sleep_level=2 has no effect"),
        # Reward functions neither.
        (
            ["placement.colocate_groups=[[train,orm]]", "placement.offload_reward_model=true"],
            "placement.offload_reward_model=true has no effect: no reward model shares its devices with another role",
        ),
        (["placement=colocate", "placement.sleep_level=3"], "placement.sleep_level=3 must be 0"),
        (["placement=colocate", "placement.sleep_level=-1"], "placement.sleep_level=-1 must be 0"),
        (
            ["placement=colocate", "rollout.enable_sleep_mode=false"],
            "rollout.enable_sleep_mode=false contradicts placement.sleep_level=1",
        ),
        (
            ["placement=colocate", "+rollout.engine_kwargs.enable_sleep_mode=true"],
            "rollout.engine_kwargs.enable_sleep_mode: set `placement.sleep_level`",
        ),
    ],
)
def test_turns_need_a_device_to_share(user: Folder, overrides: list[str], expected: str) -> None:
    message = faults(user, *APART, *overrides)
    assert expected in message
    assert "the config has 1 fault" in message


def test_whoever_shares_may_be_nobody_where_all_roles_share_what_there_is() -> None:
    run = load(["algorithm=sft", "placement=colocate"]).run
    assert run.placement.offload_model
    assert run.placement.colocated == ()


def test_a_teacher_of_any_name_may_step_aside() -> None:
    layout = ["placement.colocate_groups=[[train,teacher_math]]", "placement.offload_teacher_model=true"]
    overrides = [
        "algorithm=gkd",
        "teacher=huggingface",
        "+teacher@teacher_math=huggingface",
        "data.preprocessors=[mine.with_teacher_key]",
        "algorithm.gkd_logits_topk=4",
    ]
    assert load([*overrides, "placement=separate", *layout]).run.placement.offload_teacher_model
    with pytest.raises(ConfigError, match=r"teacher_math\.pipeline_model_parallel_size=2: a model that transformers"):
        load([*overrides, "placement=separate", *layout, "teacher_math.pipeline_model_parallel_size=2"])


def test_a_reward_model_of_any_name_may_step_aside() -> None:
    scorers = ["+orm@orm_rm=classifier", "orm_rm.model=/somewhere", "prm=model", "prm.model=/somewhere", "prm.token=x"]
    overrides = ["algorithm=grpo", *scorers, "placement=separate", "placement.offload_reward_model=true"]
    for role in ("orm_rm", "prm"):
        run = load([*overrides, f"placement.colocate_groups=[[rollout,{role}]]"]).run
        assert run.placement.offload_reward_model
        assert needs_sleep_mode(run, role)
        assert not needs_sleep_mode(run, "rollout"), "that is for sleep_level to say"
    with pytest.raises(ConfigError, match=r"placement\.offload_reward_model=true has no effect"):
        load(overrides)


def test_a_deep_sleep_needs_a_sync_that_brings_the_weights_back(user: Folder) -> None:
    user.write("algorithm/judged.yaml", JUDGED)
    user.write(
        "rolegraph_judged_code.py",
        """
        from rolegraph.algorithms.config import SFTConfig
        from rolegraph.interfaces import RolloutRole, TrainRole

        class Judged:
            Config = SFTConfig
            train: TrainRole
            rollout: RolloutRole
            judge: RolloutRole
        """,
    )
    message = faults(user, "algorithm=judged", "placement.sleep_level=2")
    assert "placement.sleep_level=2 drops the weights of judge, and no weight sync from train brings" in message
    assert "the config has 1 fault" in message
    load(["algorithm=judged", "placement.sleep_level=1"], config_dir=str(user))
    load(["algorithm=mine", "placement=colocate", "placement.sleep_level=2"], config_dir=str(user))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["placement=colocate"], True),
        (["placement=colocate", "placement.sleep_level=0"], False),
        (["placement=separate"], False),
        (["placement=colocate", "placement.sleep_level=0", "rollout.enable_sleep_mode=true"], True),
    ],
)
def test_an_engine_on_a_gpu_starts_in_sleep_mode_where_it_is_to_sleep(overrides: list[str], wanted: bool) -> None:
    run = load(["algorithm=grpo", *overrides]).run
    found = {}
    for name, inventory in {"gpu": cluster("1x2xH100-80G"), "cpu": cluster("1xcpu8")}.items():
        settled = settle(run, plan(inventory, requests(run.roles), run.placement))
        found[name] = settled.roles["rollout"].config.enable_sleep_mode
    assert found == {"gpu": wanted, "cpu": run.roles["rollout"].config.enable_sleep_mode}


def test_a_reward_model_on_an_engine_that_cannot_sleep() -> None:
    overrides = [
        "algorithm=grpo",
        "reward=null",
        "orm=vllm",
        "orm.model=/somewhere",
        "placement.offload_reward_model=true",
    ]
    with pytest.raises(
        ConfigError, match=r"orm\.enable_sleep_mode=false contradicts placement\.offload_reward_model=true"
    ):
        load([*overrides, "orm.enable_sleep_mode=false"])
    load(overrides)
