"""Every kind of fault in a config is named with its key, its origin, and what to type."""

from __future__ import annotations

import pytest

from rolegraph.config import load
from rolegraph.errors import ConfigError
from tests.rolegraph.config.conftest import Folder


def faults(user: Folder, *overrides: str) -> str:
    """The message of a config that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load(["algorithm=mine", *overrides], config_dir=str(user))
    return str(caught.value)


def test_a_sound_config_loads(user: Folder) -> None:
    run = load(["algorithm=mine", "train.lr=2e-4", "algorithm.epsilon_high=0.3"], config_dir=str(user)).run
    assert run.roles["train"].config.lr == 2e-4
    assert run.algorithm.config.epsilon_high == 0.3
    assert list(run.roles) == ["train", "rollout", "orm"]
    assert run.python_path == (str(user),)


def test_a_class_may_lie_in_folders_without_an_init(user: Folder) -> None:
    user.write("bare/deeper/code.py", "from rolegraph_user_code import Mine as Other\n")
    run = load(["algorithm=mine", "algorithm._target_=bare.deeper.code.Other"], config_dir=str(user)).run
    assert run.algorithm.target == "bare.deeper.code.Other"
    assert "bare.deeper.other" in faults(user, "algorithm._target_=bare.deeper.other.Other")


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_unknown_key_on_the_command_line(user: Folder, plus: str) -> None:
    message = faults(user, f"{plus}algorithm.epsilonn=0.3")
    assert "algorithm.epsilonn: unknown key; did you mean algorithm.epsilon?" in message
    assert f"from command line: {plus}algorithm.epsilonn=0.3" in message
    assert "1 fault:" in message


def test_unknown_key_in_a_users_file(user: Folder) -> None:
    file = user.write(
        "experiment/typo.yaml",
        """
        # @package _global_
        seed: 3
        train:
          lr: 0.1
          tensor_model_paralel_size: 2
        """,
    )
    message = faults(user, "experiment=typo")
    assert "train.tensor_model_paralel_size: unknown key; did you mean train.tensor_model_parallel_size?" in message
    assert f"from {file}:5" in message


def test_last_file_that_sets_a_key_is_named(user: Folder) -> None:
    user.write("experiment/first.yaml", "# @package _global_\ndefaults: [second]\ntrain: {lrr: 1}\n")
    file = user.write("experiment/second.yaml", "# @package _global_\n\ntrain:\n  lrr: 2\n")
    assert f"from {file.with_name('first.yaml')}:3" in faults(user, "experiment=first")
    assert "from command line: train.lrr=3" in faults(user, "experiment=first", "train.lrr=3")


def test_unknown_key_inside_a_list(user: Folder) -> None:
    message = faults(user, "reward.reward_funcs=[{_target_: soft_overlong, max_length: 9, cashe: 3}]")
    assert "reward.reward_funcs[0]" in message
    assert "cashe" in message
    assert "cache" in message
    assert "from command line: reward.reward_funcs=" in message


def test_unknown_key_in_a_loss_node(user: Folder) -> None:
    message = faults(user, "algorithm.loss={_target_: rolegraph.losses.policy.PolicyLoss, epsilonn: 0.2}")
    assert "algorithm.loss.epsilonn: unknown key; did you mean algorithm.loss.epsilon?" in message


def test_loss_by_its_signature(user: Folder) -> None:
    loss = "algorithm.loss={_target_: rolegraph_user_code.plain_loss, scale: 1, power: 3}"
    spec = load(["algorithm=mine", loss], config_dir=str(user)).run.algorithm.config.loss
    assert (spec.target, spec.kwargs) == ("rolegraph_user_code.plain_loss", {"scale": 1.0, "power": 3})
    message = faults(user, "algorithm.loss={_target_: rolegraph_user_code.plain_loss, power: 1.5, kind: c}")
    assert "algorithm.loss.scale: is missing" in message
    assert "algorithm.loss.power: 1.5 (a number) must be an integer" in message
    assert "algorithm.loss.kind" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.path=None", "data.path: 'None' is a string: type null for no value"),
        ("ray_exp_name=none", "ray_exp_name: 'none' is a string: type null for no value"),
        ("deterministic=on", "deterministic: 'on' is a string: type true"),
        ("use_ray='False'", "use_ray: 'False' is a string: type false"),
        ("train.gpus=off", "train.gpus: 'off' is a string: type null for no value"),
        ("train.megatron={normalization: None}", "train.megatron.normalization: 'None' is a string: type null"),
        ("seed=1.5", "seed: 1.5 (a number) must be an integer"),
        ("seed=-1", "seed: -1: should be greater than or equal to 0"),
        ("seed=true", "seed: true (true or false) must be an integer"),
        ("max_steps=0", "max_steps: 0: should be greater than or equal to 1"),
        ("max_steps=None", "max_steps: 'None' is a string: type null for no value"),
        ("train.dtype=float31", "must be one of auto, float32, bfloat16; did you mean float32?"),
        ("train.lr='1e-4'", 'train.lr: "1e-4" (a string) must be a number: type it without quotes'),
        ("data.path=3", "data.path: 3 (a number) must be a string"),
        ("placement.colocate_groups=[train]", "placement.colocate_groups"),
        ("model=hf", "model needs either model.path or model.maker"),
        ("algorithm.loss=3", "algorithm.loss: 3 (a number) must name a class or a function"),
        ("train=7", "train"),
    ],
)
def test_wrong_values(user: Folder, override: str, expected: str) -> None:
    message = faults(user, override)
    assert expected in message
    if override != "model=hf":
        assert override.split("=")[0] in message


def test_all_faults_come_together(user: Folder) -> None:
    message = faults(
        user, "foo=1", "algoritm=x", "train.rankss=1", "seed=a", "algorithm.num_generations=7", "data.size=0"
    )
    for part in ("foo: unknown", "did you mean algorithm?", "train.rankss", "seed", "data.size=0"):
        assert part in message
    together = faults(user, "train.rankss=1", "algorithm.num_generations=7", "rollout.max_model_len=8")
    for part in ("3 faults", "train.ranks?", "num_generations=7", "rollout.max_model_len=8"):
        assert part in together


def test_interpolation_of_a_default_and_a_broken_one(user: Folder) -> None:
    run = load(["algorithm=mine", "data.max_length=${algorithm.max_completion_length}"], config_dir=str(user)).run
    assert run.data.max_length == run.algorithm.config.max_completion_length
    message = faults(user, "data.max_length=${algorithm.lenght}", "train.rankss=1")
    assert "data.max_length: Interpolation key 'algorithm.lenght' not found" in message
    assert "train.rankss" in message


def test_a_value_that_must_be_given(user: Folder) -> None:
    user.write("experiment/open.yaml", "# @package _global_\nseed: ???\n")
    assert "seed: must be given: set seed=..." in faults(user, "experiment=open")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("roles.train.megatronn.MegatronTrain", "has no module 'megatronn'; did you mean 'megatron'?"),
        ("roles.train.megatron.MegatronTrian", "has no 'MegatronTrian'; did you mean 'MegatronTrain'?"),
        ("no_such_package.Thing", "there is no module 'no_such_package'"),
        ("Thing", "is no import path"),
    ],
)
def test_targets_that_lead_nowhere(user: Folder, target: str, expected: str) -> None:
    message = faults(user, f"train._target_={target}")
    assert expected in message
    assert f"from command line: train._target_={target}" in message


@pytest.mark.parametrize(
    "value", ["a b", "ünï=cödé", "x=y, z", "it's", 'say "hi"', "C:\\dir\\", "(a)", "[a", "{b", "#1", "50%", "日本"]
)
def test_values_survive_the_command_line(user: Folder, value: str) -> None:
    run = load(["algorithm=mine", f"data.system_prompt={value}"], config_dir=str(user)).run
    assert run.data.system_prompt == value


def test_a_bare_comma_is_a_sweep(user: Folder) -> None:
    assert "data.system_prompt=a,b" in faults(user, "data.system_prompt=a,b")


def test_only_plain_containers_come_out(user: Folder) -> None:
    override = "train.megatron={layernorm_epsilon: 1e-6, moe_layer_freq: {list: [1, {a: 2}]}}"
    run = load(["algorithm=mine", override], config_dir=str(user)).run
    megatron = run.roles["train"].config.megatron
    assert type(megatron) is dict
    assert type(megatron["moe_layer_freq"]) is dict
    assert type(megatron["moe_layer_freq"]["list"]) is list
    assert megatron == {"layernorm_epsilon": 1e-6, "moe_layer_freq": {"list": [1, {"a": 2}]}}
    assert type(run.tree) is dict


ROLE = """
    from __future__ import annotations

    from dataclasses import dataclass, field
    from typing import Annotated, Literal

    from annotated_types import Gt

    from rolegraph.interfaces import TrainRole


    @dataclass(frozen=True)
    class Inner:
        rate: Annotated[float, Gt(0)] = 0.5
        names: tuple[str, ...] = ()


    @dataclass(frozen=True)
    class CountingConfig:
        ranks: int | None = None
        start: int = 0
        inner: Inner = field(default_factory=Inner)
        several: list[Inner] = field(default_factory=list)
        by_name: dict[str, Inner] = field(default_factory=dict)
        maybe: Inner | None = None
        mode: Literal["up", "down"] = "up"


    class Counting(TrainRole):
        Config = CountingConfig

        def __init__(self, config: CountingConfig, context: object) -> None:
            super().__init__(config, context)
"""


def test_a_role_of_the_user_with_nested_config(user: Folder) -> None:
    user.write("rolegraph_user_role.py", ROLE)
    user.write("train/counting.yaml", "_target_: rolegraph_user_role.Counting\nstart: 3\n")
    overrides = ["train=counting", "train.several=[{rate: 1}, {names: [a, b]}]", "train.by_name={x: {rate: 2}}"]
    config = (
        load(["algorithm=mine", *overrides, "train.inner.rate=0.25"], config_dir=str(user)).run.roles["train"].config
    )
    assert type(config).__name__ == "CountingConfig"
    assert (config.start, config.inner.rate, config.maybe) == (3, 0.25, None)
    assert [(inner.rate, inner.names) for inner in config.several] == [(1.0, ()), (0.5, ("a", "b"))]
    assert config.by_name["x"].rate == 2.0
    message = faults(
        user,
        "train=counting",
        "train.several=[{rate: 1}, {ratee: 2}]",
        "train.by_name={x: {rate: -2}}",
        "train.inner.name=[a]",
        "train.maybe={rate: high}",
        "train.mode=dwn",
        "train.lr=1",
    )
    for part in (
        "6 faults",
        "train.several[1].ratee: unknown key; did you mean train.several[1].rate?",
        "train.by_name.x.rate: -2: should be greater than 0",
        "train.inner.name: unknown key; did you mean train.inner.names?",
        'train.maybe.rate: "high" (a string) must be a number',
        "train.mode: ",
        "did you mean down?",
        "train.lr: unknown key",
    ):
        assert part in message


def test_group_choices(user: Folder) -> None:
    assert load(["algorithm=mine", "logger=[tensorboard,wandb]"], config_dir=str(user)).run.logger.names == (
        "tensorboard",
        "wandb",
    )
    assert load(["algorithm=mine"], config_dir=str(user)).run.logger.names == ()
    message = faults(user, "model=tinny")
    assert "tinny" in message
    assert "smollm2_135m" in message


def test_no_algorithm(user: Folder) -> None:
    with pytest.raises(ConfigError, match="no algorithm is chosen: add algorithm=grpo"):
        load([])


def test_command_line_beats_experiment_beats_algorithm(user: Folder) -> None:
    user.write(
        "experiment/pick.yaml",
        """
        # @package _global_
        defaults:
          - override /algorithm: mine
          - override /reward: math
          - override /model: smollm2_135m
        seed: 5
        """,
    )
    run = load(["experiment=pick", "model=tiny"], config_dir=str(user)).run
    assert run.reward is not None
    assert run.reward.reward_funcs == ["math_equivalence"]
    assert run.model.maker == "rolegraph.models.tiny.make"
    assert run.seed == 5


def test_hydra_searchpath(user: Folder, tmp_path: object) -> None:
    user.write("other/data/own.yaml", "source: jsonl\npath: x.jsonl\nmax_lenght: 3\n")
    message = faults(user, "data=own", f"hydra.searchpath=[file://{user}/other]")
    assert "data.max_lenght: unknown key; did you mean data.max_length?" in message
    assert f"from {user}/other/data/own.yaml:3" in message


def test_device_groups_are_checked_like_any_node(user: Folder) -> None:
    file = user.write(
        "experiment/groups.yaml",
        """
        # @package _global_
        placement:
          colocate_groups: []
          device_groups:
            nproc_per_node: 1
            all:
              device: CPU
              rank: 1
              workers: [train, rollout, orm]
        """,
    )
    message = faults(user, "experiment=groups")
    assert "placement.device_groups.all.rank: unknown key; did you mean placement.device_groups.all.ranks?" in message
    assert f"from {file}:8" in message
    assert "placement.device_groups.all.ranks: is missing" in message
    sound = "placement.device_groups={all: {device: cpu, ranks: 1, workers: [train, rollout, orm]}}"
    run = load(["algorithm=mine", sound], config_dir=str(user)).run
    assert run.placement.sharing(run.roles) == (("train", "rollout", "orm"),)
    message = faults(user, sound, "placement.device_groups.all.device=NPU")
    assert "placement.device_groups.all.device: NPU is a device that Ray can hand out" in message
    assert "from command line: placement.device_groups.all.device=NPU" in message


def test_device_groups_name_the_roles_of_the_run(user: Folder) -> None:
    message = faults(user, "placement.device_groups={g: {device: cpu, ranks: 1, workers: [train, rolout]}}")
    assert (
        "placement.device_groups.g names the worker `rolout`, which takes no part in this run; did you mean" in message
    )
    assert "from command line: placement.device_groups={g" in message
    message = faults(user, "placement.device_groups={g: {device: cpu, ranks: 1, workers: [default]}}")
    assert "`default`, which stands for the train role of a plain pt or sft run: name the roles of this run" in message
    both = "placement.device_groups={g: {device: cpu, ranks: 1, workers: [train, rollout]}}"
    message = faults(user, both, "placement.colocate_groups=[[train, rollout]]")
    assert "placement.device_groups and placement.colocate_groups are two notations for one thing" in message
    assert "placement.nproc_per_node belongs to placement.device_groups" in faults(user, "placement.nproc_per_node=2")


def test_the_default_worker_is_train_in_a_plain_run() -> None:
    groups = "placement.device_groups={g: {device: cpu, ranks: 2, workers: [default]}}"
    run = load(["algorithm=sft", groups]).run
    assert run.placement.sharing(run.roles) == (("train",),)
    with pytest.raises(ConfigError, match=r"global_batch_size=1 leaves some of the 2 data-parallel ranks of train"):
        load(["algorithm=sft", groups, "algorithm.global_batch_size=1"])
    with pytest.raises(ConfigError, match=r"placement.device_groups has 2 processes for train, and use_ray is false"):
        load(["algorithm=sft", groups, "use_ray=false"])
