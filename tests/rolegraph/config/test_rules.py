"""Rules across fields, and values that follow from others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph.config import load
from rolegraph.config.rules import chats_are_not_tokenised, settle
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.config.targets import fields_in_source
from rolegraph.data import DataConfig
from rolegraph.errors import ConfigError
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from rolegraph.placement.environment import as_environment
from tests.rolegraph.config.conftest import Folder
from tests.rolegraph.config.test_check import faults


def test_resume_needs_an_algorithm_that_can_and_a_folder(user: Folder) -> None:
    assert "resume=true does not work with Mine: remove it" in faults(user, "resume=true")
    assert load(["algorithm=mine", "resume=false"], config_dir=str(user)).run.resume is False
    user.write(
        "rolegraph_lasting_code.py",
        "from rolegraph_user_code import Mine\n\n\nclass Lasting(Mine):\n    can_resume = True\n",
    )
    lasting = "algorithm._target_=rolegraph_lasting_code.Lasting"
    assert "resume=true goes on in the folder of an earlier run: name that folder" in faults(
        user, lasting, "resume=true"
    )
    assert load(["algorithm=mine", lasting, "resume=true", "output_dir=here"], config_dir=str(user)).run.resume


def test_prompts_for_a_service_are_read_as_text_and_not_tokenised() -> None:
    def needs(**sampler: object) -> Any:
        spec = Spec("algorithm", SimpleNamespace(data_needs="response"))
        return SimpleNamespace(roles={"sampler": Spec("sampler", SimpleNamespace(**sampler))}, algorithm=spec)

    assert RunConfig.data_needs.fget(needs(takes_text=True)) == "chat"  # type: ignore[attr-defined]
    assert RunConfig.data_needs.fget(needs()) == "response"  # type: ignore[attr-defined]
    settings = {"chat_template": "{{ x }}", "chat_template_kwargs": {"x": 1}, "max_teacher_prompt_length": 4}
    for key, value in {**settings, "truncation_strategy": "left"}.items():
        run: Any = SimpleNamespace(data_needs="chat", data=DataConfig(source="jsonl", **{key: value}))
        assert [text.split(" ")[0] for text in chats_are_not_tokenised(run)] == [f"data.{key}"]
        run.data_needs = "prompt"
        assert not list(chats_are_not_tokenised(run))


def test_room_for_prompt_and_response(user: Folder) -> None:
    message = faults(user, "data.max_length=100", "algorithm.max_completion_length=50", "rollout.max_model_len=149")
    assert "rollout.max_model_len=149" in message
    assert "set it to 150" in message
    run = load(
        ["algorithm=mine", "data.max_length=100", "algorithm.max_completion_length=50"], config_dir=str(user)
    ).run
    assert run.roles["rollout"].config.max_model_len == 150


def test_context_parallelism_without_transformer_engine(user: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "transformer_engine" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    message = faults(user, "train.context_parallel_size=2", "train.ranks=2")
    assert "train.context_parallel_size=2 needs Transformer Engine" in message
    # What is installed here says nothing about the machines a plan is made for.
    load(["algorithm=mine", "train.context_parallel_size=2"], config_dir=str(user), elsewhere=True)


def test_padding_free_with_tensor_parallelism(user: Folder) -> None:
    overrides = ["train.tensor_model_parallel_size=2", "train.padding_free=true", "train.sequence_parallel=false"]
    assert "asks for sequence_parallel" in faults(user, *overrides)


def test_missing_and_superfluous_roles(user: Folder) -> None:
    message = faults(user, "rollout=null", "placement=separate")
    assert "Mine needs the role `rollout`: choose one with rollout=NAME" in message
    user.write("algorithm/other.yaml", "# @package _global_\nalgorithm: {_target_: rolegraph_other_code.Only}\n")
    user.write(
        "rolegraph_other_code.py",
        """
        from rolegraph.algorithms.config import SFTConfig
        from rolegraph.interfaces import TrainRole

        class Only:
            Config = SFTConfig
            train: TrainRole
        """,
    )
    message = faults(user, "algorithm=other", "train=megatron", "rollout=vllm")
    assert "rollout: Only uses no role `rollout` (it uses train): set rollout=null" in message
    message = faults(user, "algorithm=other", "train.lr=1")
    assert "role train is configured but not chosen: add train=megatron" in message


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("[[train]]", "names fewer than two roles"),
        ("[[train,rollout],[rollout,orm]]", "names role `rollout`, which is in group 0 already"),
        ("[[train,rolout]]", "names `rolout`, which takes no part in this run"),
    ],
)
def test_colocate_groups(user: Folder, groups: str, expected: str) -> None:
    assert expected in faults(user, f"placement.colocate_groups={groups}")


def test_rewards_and_their_role(user: Folder) -> None:
    assert "orm has no reward functions" in faults(user, "reward=null")
    assert "no role runs reward functions: set reward=null, or add" in faults(user, "orm=null", "placement=separate")


@pytest.mark.parametrize("override", ["train.ranks=0", "train.cpus=-1.5", "rollout.gpus=-2", "orm.cpus=-0.5"])
def test_numbers_of_ranks_devices_and_cores(user: Folder, override: str) -> None:
    assert f"{override} must be at least {int('ranks' in override)}, or null" in faults(user, override)


ENGINES = (
    "rollout=huggingface",
    "rollout=vllm",
    "teacher=huggingface",
    "teacher=vllm",
    "sampler=huggingface",
    "sampler=vllm",
    "sampler=openai",
)
SCORERS = ("prm=functions", "prm=model", "orm=functions", "+orm@orm_x=classifier")


@pytest.mark.parametrize("choice", [*ENGINES, *SCORERS])
def test_replicas_and_ranks_are_one_number_whatever_the_role(user: Folder, choice: str) -> None:
    role = choice.partition("=")[0].rpartition("@")[2].lstrip("+")
    needed = ["sampler.service.base_url=http://h/v1", "sampler.service.model=m"] if choice == "sampler=openai" else []
    message = faults(user, choice, f"{role}.replicas=2", f"{role}.ranks=3", *needed)
    assert f"{role}.replicas=2 and {role}.ranks=3 name the same number: give one" in message


def test_every_data_parallel_rank_has_rows(user: Folder) -> None:
    batch = ["algorithm.global_batch_size=8", "algorithm.num_generations=8"]
    message = faults(user, *batch, "train.ranks=18", "train.tensor_model_parallel_size=2")
    assert "algorithm.global_batch_size=8 leaves some of the 9 data-parallel ranks of train without a row" in message
    assert load(["algorithm=mine", *batch, "train.ranks=8"], config_dir=str(user)).run.roles["train"].config.ranks == 8


def test_without_ray(user: Folder) -> None:
    message = faults(user, "use_ray=false", "train.ranks=2", "rollout.tensor_parallel_size=2")
    assert "train.ranks=2 needs processes of its own" in message
    assert "rollout.tensor_parallel_size=2 needs processes of its own" in message
    message = faults(user, "use_ray=false", "train.pipeline_model_parallel_size=2")
    assert "train.pipeline_model_parallel_size=2 needs processes of its own" in message


def test_derived_values(user: Folder) -> None:
    run = load(["algorithm=mine", "seed=7", "max_steps=30", "algorithm.beta=0.1"], config_dir=str(user)).run
    train, rollout, orm = (run.roles[role].config for role in ("train", "rollout", "orm"))
    assert (train.seed, rollout.seed) == (7, 7)
    assert train.reference == "initial"
    assert train.decay_steps == 30
    assert orm.reward == run.reward
    moved = run.with_model_path("/somewhere")
    assert {role: spec.config.model for role, spec in moved.roles.items()} == dict.fromkeys(run.roles, "/somewhere")
    assert load(["algorithm=mine"], config_dir=str(user)).run.roles["train"].config.reference is None


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (["placement=separate", "train.gpus=1", "rollout.gpus=1"], 0.9),
        (["placement=colocate"], 0.9),  # the trainer makes room
        (["placement=colocate", "placement.sleep_level=0"], 0.45),
        (["placement=colocate", "placement.offload_model=false"], 0.45),  # orm is of the group, and on no GPU
        (["placement=colocate", "rollout.gpu_memory_utilization=0.3"], 0.3),
        (["placement=colocate", "placement.device=cpu"], None),
    ],
)
def test_memory_share_of_an_engine_follows_from_the_plan(overrides: list[str], share: float | None) -> None:
    run = load(["algorithm=grpo", *overrides]).run
    run = settle(run, plan(cluster("1x2xH100-80G"), requests(run.roles), run.placement))
    assert run.roles["rollout"].config.gpu_memory_utilization == share


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model's config.json: 6 heads, 3 for keys, 4 layers, 100 positions."""
    sizes = {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 4,
        "max_position_embeddings": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return f"model.path={tmp_path}"


def test_positions_of_the_model(user: Folder, model: str) -> None:
    lengths = ["data.max_length=60", "algorithm.max_completion_length=41"]
    message = faults(user, model, "model=hf", *lengths)
    assert (
        "data.max_length=60 + algorithm.max_completion_length=41 = 101 tokens are more than the 100 positions"
        in message
    )
    assert message.count("algorithm.max_completion_length=41") == 1, "once for all roles with that model"
    assert "from command line: data.max_length=60" in message
    message = faults(user, model, "model=hf", "data.max_length=60", "rollout.max_model_len=400")
    assert "rollout.max_model_len=400 is more than the 100 positions" in message
    lengths = ["data.max_length=60", "algorithm.max_completion_length=40"]
    load(["algorithm=mine", "model=hf", model, *lengths], config_dir=str(user))
    message = faults(user, "algorithm=sft", "train=megatron", model, "model=hf", "data.max_length=101")
    assert "data.max_length=101 tokens are more than the 100 positions" in message
    assert "lower it to 100" in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.tensor_model_parallel_size=4", "train.gpus=4"],
            "train.tensor_model_parallel_size=4 does not divide the model's 6 attention heads (num_attention_heads): "
            "choose one of 1, 3",
        ),
        (
            ["train.tensor_model_parallel_size=6", "train.gpus=6"],
            "train.tensor_model_parallel_size=6 does not divide the model's 3 key and value heads",
        ),
        (["rollout.tensor_parallel_size=4"], "rollout.tensor_parallel_size=4 does not divide the model's 6 attention"),
        (
            ["rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size=2 does not divide the model's 3 key and value heads (num_key_value_heads): "
            "choose one of 1, 3, 6",
        ),
        (
            ["train.pipeline_model_parallel_size=3", "train.gpus=3"],
            "train.pipeline_model_parallel_size=3 does not divide the model's 4 layers (num_hidden_layers)",
        ),
        (["train.expert_model_parallel_size=2"], "train.expert_model_parallel_size=2, and the model has no experts"),
    ],
)
def test_sizes_of_the_model_divide(user: Folder, model: str, overrides: list[str], expected: str) -> None:
    lengths = ["data.max_length=50", "algorithm.max_completion_length=50"]
    assert expected in faults(user, "model=hf", model, *lengths, *overrides)


def test_an_engine_may_copy_key_heads(user: Folder, model: str) -> None:
    lengths = ["data.max_length=50", "algorithm.max_completion_length=50"]
    load(["algorithm=mine", "model=hf", model, *lengths, "rollout.tensor_parallel_size=6"], config_dir=str(user))


def test_a_role_with_a_model_of_its_own(user: Folder, model: str, tmp_path: Path) -> None:
    message = faults(user, f"rollout.model={tmp_path}", "data.max_length=50", "algorithm.max_completion_length=60")
    assert f"= 110 tokens are more than the 100 positions of {tmp_path}" in message


def test_one_pass_over_the_dataset_has_no_number_of_steps(user: Folder) -> None:
    run = load(["algorithm=mine", "max_steps=null"], config_dir=str(user)).run
    assert run.max_steps is None
    assert run.roles["train"].config.decay_steps is None
    message = faults(user, "max_steps=null", "train.lr_schedule=cosine")
    assert "train.lr_schedule=cosine ends with the run" in message
    assert "set train.decay_steps, or max_steps" in message
    load(["algorithm=mine", "max_steps=null", "train.lr_schedule=cosine", "train.decay_steps=9"], config_dir=str(user))


def test_a_constant_rate_has_no_end(user: Folder) -> None:
    message = faults(user, "train.decay_steps=9", "train.min_lr=1e-7")
    assert "train.decay_steps has no effect with lr_schedule=constant: set train.lr_schedule" in message
    assert "train.min_lr has no effect" in message


def test_raw_text_is_no_chat(user: Folder) -> None:
    message = faults(user, "algorithm=pt", "data.system_prompt=Think.")
    assert "data.source=reasoning_gym has questions and answers, and PT trains on a column `text`" in message
    assert "data.system_prompt has no effect: PT trains on raw text" in message
    load(["algorithm=pt", "data=jsonl", "data.path=texts.jsonl"])


def test_config_classes_contribute_rules(user: Folder) -> None:
    user.write(
        "rolegraph_rule_code.py",
        """
        from dataclasses import dataclass
        from rolegraph.algorithms.config import SFTConfig
        from rolegraph.interfaces import TrainRole

        @dataclass(frozen=True, kw_only=True)
        class RuleConfig(SFTConfig):
            size: int = 1

            def check(self, run):
                if self.size > run.data.max_length:
                    yield f"algorithm.size={self.size} is more than data.max_length={run.data.max_length}"

        class Rule:
            Config = RuleConfig
            train: TrainRole
        """,
    )
    user.write("algorithm/rule.yaml", "# @package _global_\nalgorithm: {_target_: rolegraph_rule_code.Rule}\n")
    message = faults(user, "algorithm=rule", "train=megatron", "algorithm.size=9999")
    assert "algorithm.size=9999 is more than data.max_length=64" in message
    assert "from command line: algorithm.size=9999" in message


def test_keys_for_a_library_are_checked_without_importing_it(user: Folder) -> None:
    user.write(
        "rolegraph_library/__init__.py",
        """
        raise AssertionError("imported")
        """,
    )
    user.write("rolegraph_library/base.py", "class Base:\n    width: int = 1\n")
    user.write(
        "rolegraph_library/settings.py",
        """
        from .base import Base

        class Settings(Base):
            depth: int = 1
        """,
    )
    user.write(
        "rolegraph_library_role.py",
        """
        from dataclasses import dataclass
        from typing import ClassVar

        from roles.rollout.config import VLLMRolloutConfig
        from rolegraph.interfaces import RolloutRole

        @dataclass(frozen=True, kw_only=True)
        class LibraryConfig(VLLMRolloutConfig):
            fields_of: ClassVar = {"engine_kwargs": ("rolegraph_library.settings.Settings",)}

        class Library(RolloutRole):
            Config = LibraryConfig
        """,
    )
    user.write("rollout/library.yaml", "_target_: rolegraph_library_role.Library\n")
    message = faults(user, "rollout=library", "rollout.engine_kwargs.widht=2", "rollout.engine_kwargs.depth=2")
    assert "the config has 1 fault" in message
    assert "rollout.engine_kwargs.widht is no field of Settings; did you mean width?" in message
    assert "from command line: rollout.engine_kwargs.widht=2" in message


def test_fields_of_the_libraries_are_read_from_their_source() -> None:
    megatron = fields_in_source("megatron.core.transformer.transformer_config.TransformerConfig")
    vllm = fields_in_source("vllm.engine.arg_utils.EngineArgs")
    assert megatron is None or {"normalization", "tensor_model_parallel_size"} <= megatron
    assert vllm is None or {"model", "max_num_seqs"} <= vllm
    assert fields_in_source("rolegraph.nowhere.Settings") is None


def test_vllm_and_megatron_do_not_share_a_process(user: Folder) -> None:
    assert "torch.distributed" in faults(user, "use_ray=false", "model=tiny")


def test_vllm_has_a_hottest_temperature(user: Folder) -> None:
    assert "algorithm.temperature=2.5: vLLM samples at 2 at most" in faults(user, "algorithm.temperature=2.5")


OVERLAP = ("algorithm.max_staleness=1", "placement=separate")


def test_overlap_is_fine_on_devices_of_their_own(user: Folder) -> None:
    config = load(["algorithm=mine", *OVERLAP, "algorithm.on_sync=drain"], config_dir=str(user)).run.algorithm.config
    assert (config.max_staleness, config.on_sync) == (1, "drain")
    load(["algorithm=mine", "placement=colocate", "algorithm.max_staleness=0"], config_dir=str(user))


def test_a_teacher_may_take_turns_with_a_trainer_that_others_overlap() -> None:
    words = ["algorithm=gkd", "teacher=huggingface", *OVERLAP]
    load([*words, "placement.colocate_groups=[[train,teacher]]"])
    with pytest.raises(ConfigError) as caught:
        load([*words, "placement.colocate_groups=[[train,rollout,teacher]]"])
    assert "algorithm.max_staleness=1 lets rollout work while train does" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load([*words, "placement.colocate_groups=[[rollout,teacher]]"])
    assert "algorithm.max_staleness=1 lets teacher work at its pace, while weights come to rollout" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("algorithm.max_staleness=1", "placement=colocate"),
            "algorithm.max_staleness=1 lets rollout and orm work while train does, and placement puts them on the same "
            "devices, where they take turns: set placement=separate (or device groups of their own), or "
            "algorithm.max_staleness=0\n      from command line: algorithm.max_staleness=1",
        ),
        (
            (*OVERLAP, "placement.colocate_groups=[[rollout,orm]]"),
            "algorithm.max_staleness=1 lets orm work at its pace, while weights come to rollout, and placement puts",
        ),
        (
            (*OVERLAP, "deterministic=true"),
            "deterministic=true needs algorithm.max_staleness=0: with 1, which weights draw a token depends on when",
        ),
        (("placement=separate", "algorithm.max_staleness=-1"), "algorithm.max_staleness: -1"),
        (("placement=separate", "algorithm.max_staleness=null"), "algorithm.max_staleness: null"),
        (
            (*OVERLAP, "algorithm.on_sync=wait"),
            'algorithm.on_sync: "wait" (a string) must be one of keep, drain or null',
        ),
        (
            ("placement=separate", "algorithm.on_sync=keep"),
            "algorithm.on_sync has no effect with max_staleness=0, where no sample is being drawn at a sync: remove it",
        ),
    ],
)
def test_what_overlap_refuses(user: Folder, overrides: tuple[str, ...], message: str) -> None:
    assert message in faults(user, *overrides)


def test_overlap_belongs_to_algorithms_that_generate(user: Folder) -> None:
    assert "algorithm.max_staleness: unknown key" in faults(user, "algorithm=sft", "algorithm.max_staleness=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("placement.env.RANK=1", "placement.env.RANK is set for each rank as torch expects it; remove it"),
        ("placement.env.CUDA_VISIBLE_DEVICES=0", "follows from the plan: set it where `rolegraph run`"),
        ("placement.env.OMP_NUM_THREADS=4", "follows from the cores of the plan: set ROLE.cpus"),
        ("placement.env.PYTHONPATH=/code", "give a folder with --config-dir"),
        ("placement.env.LD_PRELOAD=x.so", "is read when a process starts"),
        ("placement.env.RAY_DEDUP_LOGS=0", "set it where Ray is started"),
        ("placement.env.DEBUG=true", "placement.env.DEBUG=true must be a string or a number"),
        ("placement.env.DEBUG=null", "a variable has no null"),
        ("placement.env.DEBUG=[1]", "must be a string or a number, not list"),
        ("placement.env={2FAST: 1}", "placement.env.2FAST is no name of a variable"),
        ("placement.setup_timeout_s=0", "placement.setup_timeout_s=0.0 must be more than 0 seconds, or null to wait"),
    ],
)
def test_environment_and_deadlines_of_roles(user: Folder, override: str, expected: str) -> None:
    assert expected in faults(user, override)


def test_environment_that_a_config_names(user: Folder) -> None:
    env = ["placement.env.NCCL_DEBUG=INFO", "placement.env.GLOO_TIMEOUT=2.5", "placement.env.EMPTY=''"]
    placement = load(["algorithm=mine", *env], config_dir=str(user)).run.placement
    assert as_environment(placement.env) == {"NCCL_DEBUG": "INFO", "GLOO_TIMEOUT": "2.5", "EMPTY": ""}
