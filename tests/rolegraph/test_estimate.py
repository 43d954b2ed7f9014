"""The memory estimate of whole runs: its phases, what leaves a device meanwhile, and the keys that warnings name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolegraph.advice import size
from rolegraph.config import load
from rolegraph.config.schema import RunConfig
from rolegraph.estimate import estimate
from rolegraph.needs import DeviceNeed, Estimate, PhaseNeed
from rolegraph.placement import Inventory, Plan, plan, requests
from rolegraph.placement.clusters import GIB, cluster
from tests.rolegraph.config.conftest import Folder, user  # noqa: F401 - a fixture

SIZES = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
"""Qwen3 8B."""
PARAMETERS = 8_190_735_360


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return ["algorithm=grpo", "model=hf", f"model.path={tmp_path}"]


def estimated(overrides: list[str], nodes: str, **placement: object) -> tuple[RunConfig, Plan, Estimate]:
    """A run on made-up hardware."""
    run = load(overrides).run
    for name, value in placement.items():
        object.__setattr__(run.placement, name, value)
    inventory: Inventory = cluster(nodes)
    placed = plan(inventory, requests(run.roles), run.placement)
    return run, placed, estimate(run, placed, inventory)


def phase(need: DeviceNeed, name: str) -> PhaseNeed:
    return next(phase for phase in need.phases if phase.name == name)


def part(need: DeviceNeed, name: str, role: str, part: str) -> int | None:
    return next((use.bytes for use in phase(need, name).uses if (use.role, use.part) == (role, part)), None)


def test_separate_roles_have_their_own_phases(model: list[str]) -> None:
    _, _, found = estimated([*model, "placement=separate", "train.gpus=8", "rollout.gpus=8"], "2x8xH100-80G")
    train, rollout = found.needs
    assert [phase.name for phase in train.phases] == ["train", "sync"]
    assert [phase.name for phase in rollout.phases] == ["generate", "sync"]
    assert part(train, "train", "train", "weights") == 2 * PARAMETERS + 2 * 2 * 4096 * (-151_936 % 128)
    assert part(train, "train", "train", "optimizer") == 12 * PARAMETERS // 8
    assert part(train, "sync", "train", "activations") is None
    assert phase(rollout, "generate").total == round(0.9 * 80 * GIB)
    assert (train.capacity, train.usable) == (80 * GIB, 72 * GIB)
    assert found.unknown == {}


def test_phases_follow_from_the_algorithm(model: list[str]) -> None:
    overrides = [*model, "placement=colocate", "algorithm.beta=0.1", "algorithm.num_iterations=2", "train.gpus=8"]
    (need,) = estimated(overrides, "1x8xH100-80G")[2].needs
    assert [phase.name for phase in need.phases] == ["generate", "logprobs", "ref_logprobs", "train", "sync"]
    assert part(need, "train", "train", "reference") == part(need, "train", "train", "weights")
    forward, backward = part(need, "logprobs", "train", "activations"), part(need, "train", "train", "activations")
    assert forward is not None
    assert backward is not None
    assert forward < backward / 5


def test_what_steps_aside_is_not_there(model: list[str]) -> None:
    overrides = [*model, "placement=colocate", "train.gpus=8"]
    awake = {"offload_model": False, "offload_optimizer": False, "sleep_level": 0}
    (stay,) = estimated(overrides, "1x8xH100-80G", **awake)[2].needs
    assert part(stay, "generate", "train", "optimizer") is not None
    assert part(stay, "train", "rollout", "kv_cache") is not None
    turns = {"offload_model": True, "offload_optimizer": True, "sleep_level": 1}
    _, placed, found = estimated(overrides, "1x8xH100-80G", **turns)
    (need,) = found.needs
    assert {use.role for use in phase(need, "generate").uses} == {"rollout"}
    assert {use.role for use in phase(need, "train").uses} == {"train"}
    assert {(use.role, use.part) for use in phase(need, "sync").uses} == {
        ("train", "weights"), ("rollout", "weights"),
    }  # fmt: skip
    assert part(need, "train", "train", "gradients") == 4 * PARAMETERS + 4 * 2 * 4096 * (-151_936 % 128)
    assert placed.roles["rollout"][0].share == 1.0
    assert phase(need, "generate").total == round(0.9 * 80 * GIB)
    (need,) = estimated(overrides, "1x8xH100-80G", **awake | {"offload_optimizer": True})[2].needs
    assert part(need, "generate", "train", "optimizer") is None
    assert part(need, "generate", "train", "weights") is not None
    # Gradients are dropped with whatever leaves, and a step makes room for them again.
    assert part(need, "generate", "train", "gradients") is part(need, "sync", "train", "gradients") is None
    (need,) = estimated(overrides, "1x8xH100-80G", **awake | {"offload_model": True})[2].needs
    assert part(need, "generate", "train", "gradients") is None
    assert part(need, "sync", "train", "gradients") is not None


def test_teachers_of_any_name_work_together_and_step_aside(model: list[str]) -> None:
    teachers = [
        "+teacher@teacher_math=huggingface",
        "teacher=huggingface",
        "algorithm=gkd",
        "data.preprocessors=[mine.with_teacher_key]",
    ]
    overrides = [*model, *teachers, "placement=colocate", "train.gpus=8", "algorithm.gkd_logits_topk=4"]
    _, placed, found = estimated(overrides, "1x8xH200-141G", offload_teacher_model=True)
    (need,) = found.needs
    for name, there in (("teacher", True), ("train", False)):
        for role in ("teacher", "teacher_math"):
            assert (part(need, name, role, "weights") is not None) is there, (name, role)
    assert part(need, "teacher", "teacher_math", "activations") is not None
    assert placed.roles["teacher_math"][0].share == 1 / 2
    (need,) = estimated(overrides, "1x8xH200-141G", offload_teacher_model=False)[2].needs
    assert part(need, "train", "teacher_math", "weights") is not None


def test_reward_models_have_a_phase_each_and_step_aside(model: list[str]) -> None:
    folder = model[-1].partition("=")[2]
    scorers = ["prm=model", f"prm.model={folder}", "prm.token=x", "+orm@orm_rm=classifier", f"orm_rm.model={folder}"]
    overrides = [*model, *scorers, "placement=colocate", "train.gpus=8"]
    _, placed, found = estimated(overrides, "1x8xH100-80G")
    (need,) = found.needs
    assert [phase.name for phase in need.phases] == ["generate", "score_prm", "score_orm_rm", "train", "sync"]
    for role in ("prm", "orm_rm"):
        assert {use.role for use in phase(need, f"score_{role}").uses} == {role}
        assert part(need, f"score_{role}", role, "weights") == 2 * PARAMETERS
        assert part(need, f"score_{role}", role, "activations")
    assert placed.roles["prm"][0].share == placed.roles["rollout"][0].share == 1.0
    _, placed, found = estimated(overrides, "1x8xH100-80G", offload_reward_model=False)
    (need,) = found.needs
    for name in ("generate", "score_orm_rm", "train"):
        assert part(need, name, "prm", "weights") == 2 * PARAMETERS, name
        assert part(need, name, "prm", "activations") is None
    assert placed.roles["prm"][0].share == 1 / 3, "two stay, and one of those that step aside"
    cut = ["train.tensor_model_parallel_size=8", "rollout.tensor_parallel_size=8"]
    (need,) = estimated([*overrides, *cut], "1x8xV100-32G", offload_reward_model=False)[2].needs
    assert "train does not fit" in need.warnings[-2]
    assert "prm weights, 15.3 GiB: set placement.offload_reward_model=true" in need.warnings[-2]


def test_reward_models_on_devices_of_their_own(model: list[str]) -> None:
    folder = model[-1].partition("=")[2]
    scorers = ["prm=model", f"prm.model={folder}", "prm.token=x", "prm.gpus=2"]
    layout = ["placement=separate", "train.gpus=4", "rollout.gpus=2", *scorers]
    *_, prm = estimated([*model, *layout], "1x8xH100-80G")[2].needs
    assert (prm.roles, [phase.name for phase in prm.phases]) == (("prm",), ["score_prm"])
    *_, prm = estimated([*model, *layout], "1x8xT4-16G")[2].needs
    assert "prm weights, 15.3 GiB: choose a smaller model (prm.model), or devices with more memory" in prm.warnings[0]


def test_a_teacher_in_an_engine_moves_as_one(model: list[str]) -> None:
    layout = ["teacher=vllm", "algorithm=gkd", "algorithm.gkd_logits_topk=4", "placement=colocate", "train.gpus=8"]
    (need,) = estimated([*model, *layout], "1x8xH200-141G", offload_teacher_model=True)[2].needs
    for name, there in (("teacher", True), ("train", False), ("generate", False)):
        held = [part(need, name, "teacher", each) for each in ("weights", "workspace", "kv_cache")]
        assert [size is not None for size in held] == [there] * 3, name


def test_a_teacher_on_several_ranks_is_cut(model: list[str]) -> None:
    layout = ["teacher=megatron", "algorithm=gkd", "placement=separate", "train.gpus=4", "rollout.gpus=4"]
    sizes = ["teacher.gpus=8", "teacher.tensor_model_parallel_size=4", "teacher.pipeline_model_parallel_size=2"]
    *_, teacher = estimated([*model, *layout, *sizes], "2x8xH100-80G")[2].needs
    found = part(teacher, "teacher", "teacher", "weights")
    assert found == pytest.approx(2 * PARAMETERS / 8, rel=0.01)


def test_a_policy_that_teaches_itself_by_its_average_keeps_that(model: list[str]) -> None:
    gkd = [*model, "algorithm=gkd", "teacher=self", "teacher.weights=average", "train.gpus=8", "rollout.gpus=8"]
    (need,) = estimated([*gkd, "placement=colocate"], "1x8xH100-80G")[2].needs
    assert [phase.name for phase in need.phases] == ["generate", "teach", "train", "sync"]
    weights, average = (part(need, "teach", "train", name) for name in ("weights", "average"))
    assert weights is not None
    assert average == 2 * weights, "float32 beside bfloat16"
    assert part(need, "generate", "train", "average") is None, "it leaves with the weights"
    forward, backward = part(need, "teach", "train", "activations"), part(need, "train", "train", "activations")
    assert forward is not None
    assert backward is not None
    assert forward < backward / 5


def test_a_separate_role_never_steps_aside(model: list[str]) -> None:
    overrides = [*model, "placement=separate", "train.gpus=4", "rollout.gpus=4"]
    train, rollout = estimated(overrides, "1x8xH100-80G", offload_model=True, sleep_level=2)[2].needs
    assert part(train, "sync", "train", "optimizer") is not None
    assert part(rollout, "sync", "rollout", "kv_cache") is not None


@pytest.mark.parametrize(
    ("extra", "nodes", "expected"),
    [
        (
            ["placement=colocate", "train.gpus=8", "placement.offload_model=false"],
            "1x8xL40-32G",
            ["placement.offload_model=true"],
        ),
        (
            ["placement=colocate", "train.gpus=8", "placement.offload_optimizer=false"],
            "1x8xH100-80G",
            ["train gradients, 30.5 GiB: set placement.offload_optimizer=true", "sync does not fit"],
        ),
        (
            ["placement=separate", "train.gpus=4", "rollout.gpus=4", "train.use_distributed_optimizer=false"],
            "1x8xH100-80G",
            ["train optimizer, 91.5 GiB: set train.use_distributed_optimizer=true"],
        ),
        (
            ["placement=separate", "train.gpus=4", "rollout.gpus=4"],
            "1x8xA100-40G",
            ["raise train.tensor_model_parallel_size (1) or train.pipeline_model_parallel_size (1)"],
        ),
        (
            ["placement=separate", "train.gpus=16", "rollout.gpus=8", "algorithm.max_completion_length=8192"],
            "3x8xH200-141G",
            ["train activations, 161 GiB: lower train.micro_batch_size (4)"],
        ),
        (
            [
                "placement=separate",
                "train.gpus=16",
                "rollout.gpus=8",
                "train.max_tokens_per_micro_batch=40000",
                "algorithm.max_completion_length=16384",
                "algorithm.global_batch_size=128",
            ],
            "3x8xH200-141G",
            ["lower train.max_tokens_per_micro_batch (40000) to about"],
        ),
        (
            [
                "placement=separate",
                "train.gpus=16",
                "rollout.gpus=8",
                "train.micro_batch_size=1",
                "algorithm.max_completion_length=32768",
            ],
            "3x8xH200-141G",
            ["set train.megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"],
        ),
        (
            ["placement=separate", "train.gpus=8", "rollout.gpus=8"],
            "1x8xH200-141G,1x8xL4-16G",
            ["rollout: its share of 14.4 GiB leaves no KV cache for one sample", "raise rollout.tensor_parallel_size"],
        ),
        (
            ["placement=separate", "train.gpus=8", "rollout.gpus=8", "rollout.kv_cache_bytes=99000000000"],
            "2x8xH200-141G",
            ["rollout kv cache, 92.2 GiB: lower rollout.kv_cache_bytes (99000000000)"],
        ),
    ],
)
def test_warnings_name_the_key(model: list[str], extra: list[str], nodes: str, expected: list[str]) -> None:
    found = estimated([*model, *extra], nodes)[2]
    warnings = "\n".join(line for need in found.needs for line in need.warnings)
    if "kv_cache_bytes=99" in " ".join(extra):
        # Fits alone, and no longer beside a cache that does not know of the rest.
        assert warnings == ""
        found = estimated([*model, *extra], "2x8xH100-80G")[2]
        warnings = "\n".join(line for need in found.needs for line in need.warnings)
    for text in expected:
        assert text in warnings


def test_what_a_warning_advises_helps(model: list[str]) -> None:
    base = [*model, "placement=separate", "train.gpus=16", "rollout.gpus=8", "algorithm.max_completion_length=16384"]
    base += ["algorithm.global_batch_size=128"]
    tokens = 40_000
    (warning, *_) = (
        estimated([*base, f"train.max_tokens_per_micro_batch={tokens}"], "3x8xH200-141G")[2].needs[0].warnings
    )
    advised = int(warning.partition("to about ")[2].split(";")[0])
    assert tokens / 8 < advised < tokens
    need = estimated([*base, f"train.max_tokens_per_micro_batch={advised}"], "3x8xH200-141G")[2].needs[0]
    assert need.warnings == ()
    assert phase(need, "train").total == pytest.approx(need.usable, rel=0.02)


def test_nothing_is_compared_with_a_memory_that_is_not_known(model: list[str]) -> None:
    overrides = [*model, "placement=colocate", "train.gpus=8"]
    (need,) = estimated(overrides, "1x8xH100")[2].needs
    assert (need.capacity, need.usable, need.warnings, need.notes) == (None, None, (), ())
    # 256 sequences of 320 tokens, 144 KiB a token.
    assert part(need, "generate", "rollout", "kv_cache") == 256 * 320 * 144 * 1024


def test_the_smallest_device_counts(model: list[str]) -> None:
    overrides = [*model, "placement=separate", "train.gpus=16", "rollout.gpus=8"]
    train, _ = estimated(overrides, "1x8xH100-80G,1x8xA100-40G,1x8xL4-24G")[2].needs
    assert train.capacity == 40 * GIB
    assert train.where == "each of 16 GPUs of train (H100, A100)"


def test_samples_that_wait_are_a_note(model: list[str]) -> None:
    overrides = [
        *model,
        "placement=separate",
        "train.gpus=8",
        "rollout.gpus=8",
        "algorithm.max_completion_length=30000",
    ]
    rollout = estimated(overrides, "2x8xH100-80G")[2].needs[1]
    (note,) = rollout.notes
    assert "samples of the full 30064 tokens, more wait inside the engine (rollout.max_num_seqs=256)" in note


def test_on_cpus_all_ranks_of_a_machine_count() -> None:
    overrides = ["algorithm=grpo", "placement=colocate", "train.ranks=2", "rollout.replicas=2"]
    (need,) = estimated(overrides, "2xcpu2-8G")[2].needs
    assert need.where == "each of 2 machines with train, rollout"
    (double,) = estimated(overrides, "1xcpu4-8G")[2].needs
    assert part(double, "train", "train", "weights") == 2 * part(need, "train", "train", "weights")
    assert part(double, "train", "rollout", "weights") is not None, "on CPUs nothing steps aside"


def test_a_model_that_is_not_here_has_no_estimate() -> None:
    overrides = ["algorithm=grpo", "model=hf", "model.path=owner/nowhere", "train.gpus=4", "rollout.gpus=4"]
    _, _, found = estimated(overrides, "1x8xH100-80G")
    assert found.needs == ()
    assert found.unknown["train"] == "owner/nowhere is not on this machine yet"


def test_a_run_without_responses(model: list[str]) -> None:
    overrides = ["algorithm=sft", *model[1:], "data.max_length=2000", "algorithm.global_batch_size=16", "train.gpus=8"]
    (need,) = estimated(overrides, "1x8xH100-80G")[2].needs
    assert [phase.name for phase in need.phases] == ["train"]
    short = [*overrides, "data.max_length=1000"]
    (half,) = estimated(short, "1x8xH100-80G")[2].needs
    whole, less = part(need, "train", "train", "activations"), part(half, "train", "train", "activations")
    assert whole is not None
    assert less is not None
    # Two rows a rank; the head keeps the same 512 MiB of either.
    assert whole - 2**29 == pytest.approx(2 * (less - 2**29), abs=2)


def test_a_role_of_a_users_own_is_a_copy_of_its_model(user: Folder, model: list[str]) -> None:  # noqa: F811
    user.write(
        "rolegraph_own_role.py",
        """
        from dataclasses import dataclass
        from rolegraph.interfaces import RolloutRole

        @dataclass(frozen=True, kw_only=True)
        class OwnConfig:
            replicas: int | None = None
            gpus: int | None = None
            tensor_parallel_size: int = 1
            model: str | None = None
            dtype: str = "auto"

        class Own(RolloutRole):
            Config = OwnConfig
        """,
    )
    user.write("rollout/own.yaml", "_target_: rolegraph_own_role.Own\n")
    overrides = [*model, "placement=separate", "rollout=own", "train.gpus=4", "rollout.gpus=2"]
    run = load(overrides, config_dir=str(user)).run
    inventory = cluster("1x8xH100-80G")
    needs = estimate(run, plan(inventory, requests(run.roles), run.placement), inventory).needs
    assert part(needs[1], "generate", "rollout", "weights") == 2 * PARAMETERS
    assert part(needs[1], "generate", "rollout", "kv_cache") is None


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 2**20, 300 * 2**20, 3 * GIB, 2000 * GIB)] == [
        "0 MiB", "1 MiB", "0.293 GiB", "3 GiB", "2,000 GiB",
    ]  # fmt: skip
