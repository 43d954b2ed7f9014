"""Rules across the options of algorithms: each broken once, the message read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph.algorithms.config import GRPOConfig, PTConfig, SFTConfig, WarmStartConfig
from rolegraph.config.schema import Spec
from rolegraph.interfaces import LossSpec
from rolegraph.losses import resolve
from rolegraph.losses.config import PolicyLossConfig, PolicyOptions

POLICY = "rolegraph.losses.policy.PolicyLoss"


def faults(**options: Any) -> list[str]:
    return list(GRPOConfig(**options).check(None))


@pytest.mark.parametrize("config", [GRPOConfig(), SFTConfig(), PTConfig()])
def test_the_defaults_are_fine(config: Any) -> None:
    assert list(config.check(None)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch_size": 30, "num_generations": 8},
            "algorithm.global_batch_size=30 samples a step are no whole number of groups of num_generations=8 "
            "(30 / 8 = 3.75): set global_batch_size=24 or 32, or num_generations=6 or 10",
        ),
        (
            {"global_batch_size": 3, "num_generations": 8},
            "algorithm.global_batch_size=3 samples a step are no whole number of groups of num_generations=8 "
            "(3 / 8 = 0.38): set global_batch_size=8, or num_generations=3",
        ),
        ({"num_generations": 1}, "algorithm.num_generations=1: grpo compares the samples of one prompt and needs"),
        ({"num_generations": 1, "advantage_estimator": "rloo"}, "algorithm.num_generations=1: rloo compares"),
        (
            {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus", "dynamic_sample": True},
            "algorithm.dynamic_sample=true drops every group of num_generations=1",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "group"},
            "algorithm.scale_rewards=group: reinforce_plus_plus normalises over the whole batch",
        ),
        ({"delta": 1.1}, "algorithm.delta=1.1 must exceed 1 + epsilon_high = 1.2"),
        ({"delta": 1.4, "epsilon_high": 0.5}, "algorithm.delta=1.4 must exceed 1 + epsilon_high = 1.5"),
        ({"delta": 3.0, "loss_type": "cispo"}, "algorithm.delta has no effect with loss_type=cispo: remove it"),
        ({"delta": 3.0, "loss_type": "sapo"}, "algorithm.delta has no effect with loss_type=sapo: remove it"),
        ({"epsilon": 1.0}, "algorithm.epsilon=1.0 leaves the ratio no lower bound"),
        ({"epsilon": 0.1, "loss_type": "sapo"}, "algorithm.epsilon has no effect with loss_type=sapo"),
        ({"epsilon_high": 0.1, "loss_type": "sapo"}, "algorithm.epsilon_high has no effect with loss_type=sapo"),
        ({"tau_pos": 2.0}, "algorithm.tau_pos is for loss_type=sapo, and loss_type is grpo: remove it"),
        ({"tau_neg": 2.0}, "algorithm.tau_neg is for loss_type=sapo, and loss_type is grpo: remove it"),
        ({"kl_in_reward": True}, "algorithm.kl_in_reward=true has no effect with beta=0"),
        (
            {"rollout_importance_threshold": 3.0},
            "algorithm.rollout_importance_threshold has no effect without a correction",
        ),
        ({"max_resample_times": 2}, "algorithm.max_resample_times has no effect without dynamic_sample"),
        (
            {"loss": LossSpec("my.loss"), "epsilon": 0.1},
            "algorithm.epsilon belongs to the default loss, and algorithm.loss is my.loss: give it as "
            "algorithm.loss.epsilon if that takes it, or remove it",
        ),
        (
            {"loss": LossSpec(POLICY, {"loss_type": "dr_grpo"})},
            "algorithm.loss.max_completion_length is missing: loss_type=dr_grpo divides by it",
        ),
        (
            {"loss": LossSpec(POLICY, {"max_completion_length": 9})},
            "algorithm.loss.max_completion_length has no effect with loss_type=grpo",
        ),
        ({"loss": LossSpec(POLICY, {"kl_returns": "none"})}, "algorithm.loss.kl_returns has no effect with beta=0"),
        ({"loss": LossSpec(POLICY, {"tau_pos": 2.0})}, "algorithm.loss.tau_pos is for loss_type=sapo"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    (fault,) = faults(**options)
    assert fault.startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"delta": 1.5, "epsilon_high": 0.4},
        {"loss_type": "sapo", "tau_pos": 2.0, "tau_neg": 3.0},
        {"loss_type": "cispo", "epsilon": 1.0, "epsilon_high": 4.0},
        {"kl_in_reward": True, "beta": 0.1},
        {"rollout_importance_correction": "mask", "rollout_importance_threshold": 3.0},
        {"dynamic_sample": True, "max_resample_times": 2},
        {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus", "scale_rewards": "none"},
        {"loss": LossSpec(POLICY, {"loss_type": "dr_grpo", "max_completion_length": 9})},
    ],
)
def test_what_is_fine(options: dict[str, Any]) -> None:
    assert faults(**options) == []


def test_all_faults_are_reported_together() -> None:
    assert len(faults(global_batch_size=30, kl_in_reward=True, tau_pos=2.0, max_resample_times=1)) == 4


def test_the_options_of_the_default_loss_reach_it() -> None:
    """Each option of the loss, flipped in the algorithm's config, is flipped in the loss that comes out."""
    flips: dict[str, Any] = {
        "loss_type": "dr_grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "delta": 2.0,
        "beta": 0.5,
        "teacher_kl_coef": 0.5,
        "top_entropy_quantile": 0.5,
        "rollout_importance_correction": "mask",
        "rollout_importance_threshold": 3.0,
        "tau_pos": 2.0,
        "tau_neg": 3.0,
    }
    assert set(flips) == {f.name for f in fields(PolicyOptions)}
    for name, value in flips.items():
        loss = resolve(GRPOConfig(max_completion_length=77, **{name: value}).loss_spec())
        assert getattr(loss, name) == value
        assert loss.max_completion_length == (77 if name == "loss_type" else None)  # type: ignore[attr-defined]
    assert resolve(GRPOConfig().loss_spec()) == resolve(LossSpec(POLICY))


def test_batch_arithmetic() -> None:
    config = GRPOConfig(global_batch_size=32, num_generations=4, steps_per_generation=3, num_iterations=2)
    assert (config.prompts_per_generation, config.steps_per_batch) == (24, 6)


@pytest.mark.parametrize(
    ("estimator", "scale"), [("grpo", "group"), ("rloo", "none"), ("reinforce_plus_plus", "batch")]
)
def test_each_estimator_scales_as_its_paper(estimator: Any, scale: str) -> None:
    assert GRPOConfig(advantage_estimator=estimator).scale == scale
    assert GRPOConfig(advantage_estimator=estimator, scale_rewards="none").scale == "none"


def test_what_the_rest_of_the_run_has_to_provide() -> None:
    plain = GRPOConfig()
    assert not (plain.needs_reference)
    assert not (plain.needs_logprobs)
    assert not (plain.needs_entropy)
    assert replace(plain, beta=0.1).needs_reference
    assert replace(plain, num_iterations=2).needs_logprobs
    assert replace(plain, steps_per_generation=2).needs_logprobs
    assert replace(plain, beta=0.1, kl_in_reward=True).needs_logprobs
    assert replace(plain, top_entropy_quantile=0.5).needs_entropy
    assert replace(plain, top_entropy_quantile=0.5).needs_logprobs
    assert plain.data_needs == "prompt"
    assert replace(plain, warm_start=WarmStartConfig(max_steps=1)).data_needs == "response"
    own = replace(plain, loss=LossSpec(POLICY, {"beta": 0.1, "kl_returns": "batch", "top_entropy_quantile": 0.5}))
    assert own.needs_reference
    assert own.needs_logprobs
    assert own.needs_entropy
    assert SFTConfig().data_needs == "response"
    assert PTConfig().data_needs == "text"
    assert not SFTConfig().needs_reference


def test_algorithms_import_no_engine() -> None:
    code = (
        "import sys, rolegraph.algorithms.grpo, rolegraph.algorithms.sft, rolegraph.losses.config;"
        "print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_defaults_live_in_one_place() -> None:
    """GRPO's options of the loss are those of the loss, defaults included."""
    ours = {f.name: f.default for f in fields(GRPOConfig)}
    assert {f.name: ours[f.name] for f in fields(PolicyOptions)} == {f.name: f.default for f in fields(PolicyOptions)}
    assert PolicyLossConfig().loss_type == GRPOConfig().loss_type


class Engine:
    """The config of a teacher whose logprobs are always of temperature 1."""


def faults_with(roles: tuple[str, ...], **options: Any) -> list[str]:
    run = SimpleNamespace(roles={role: Spec("a.VLLMTeacher", Engine()) for role in roles})
    return list(GRPOConfig(**options).check(run))


@pytest.mark.parametrize(
    ("roles", "options", "message"),
    [
        (("orm",), {"teacher_kl_coef": 1.0}, "algorithm.teacher_kl_coef needs a teacher: choose one with teacher=NAME"),
        (("orm", "teacher"), {}, "teacher is idle with algorithm.teacher_kl_coef=0: set it above 0, or teacher=null"),
        ((), {}, "nothing to learn from without rewards: choose orm=functions, or a teacher and teacher_kl_coef"),
        (
            ("teacher",),
            {"teacher_kl_coef": 1.0, "dynamic_sample": True},
            "algorithm.dynamic_sample=true looks at rewards, and orm=null",
        ),
        (
            ("orm", "teacher"),
            {"teacher_kl_coef": 1.0, "temperature": 0.9},
            "algorithm.teacher_kl_coef at temperature=0.9 needs teacher logprobs at that temperature",
        ),
    ],
)
def test_teachers_and_rewards_go_together(roles: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    found = faults_with(roles, **options)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_teacher_needs_neither_rewards_nor_groups() -> None:
    assert faults_with(("teacher",), teacher_kl_coef=1.0, num_generations=1) == []
    assert faults_with(("orm", "teacher"), teacher_kl_coef=1.0) == []


PER_STEP = {"prm_reward": "per_step"}


@pytest.mark.parametrize(
    ("roles", "options", "message"),
    [
        (
            ("orm", "prm"),
            {"score_weights": {"orm_judge": 2.0}},
            "algorithm.score_weights names `orm_judge`, and the reward roles of this run are orm, prm: remove it",
        ),
        (
            ("orm", "orm_judge"),
            {"score_weights": {"orm_judge": 0.0}},
            "orm_judge is idle with algorithm.score_weights.orm_judge=0: give it another weight, or orm_judge=null",
        ),
        (("orm",), {"prm_reward": "min"}, "algorithm.prm_reward=min has no effect without a prm: choose one with prm="),
        (
            ("orm", "prm"),
            {**PER_STEP, "advantage_estimator": "rloo"},
            "algorithm.prm_reward=per_step compares each step with those of its group, and advantage_estimator=rloo "
            "has another baseline: set advantage_estimator=grpo, or prm_reward to min, mean or last",
        ),
        (
            ("prm",),
            {**PER_STEP, "dynamic_sample": True},
            "algorithm.dynamic_sample=true looks at rewards, and no role rewards whole responses: set it to false",
        ),
        (
            ("orm", "prm"),
            {**PER_STEP, "loss": LossSpec(POLICY)},
            "algorithm.prm_reward=per_step belongs to the default loss, and algorithm.loss is given: set "
            "algorithm.loss.step_scale=group as well",
        ),
        (
            ("orm", "prm"),
            {"loss": LossSpec(POLICY, {"step_scale": "group"})},
            "algorithm.loss.step_scale rewards single steps: set algorithm.prm_reward=per_step as well",
        ),
        (
            ("orm", "prm"),
            {"loss": LossSpec(POLICY, {"step_weight": 2.0})},
            "algorithm.loss.step_weight has no effect without step_scale: set it to group, batch or none",
        ),
        (
            ("orm", "prm"),
            {**PER_STEP, "loss": LossSpec(POLICY, {"step_scale": "group", "kl_returns": "none", "beta": 0.1})},
            "algorithm.loss.step_scale and kl_returns both make advantages of tokens: set one of them to null",
        ),
        (
            ("orm", "prm"),
            {**PER_STEP, "loss": LossSpec(POLICY, {"step_scale": "group"}), "score_weights": {"prm": 2.0}},
            "algorithm.score_weights.prm has no effect with prm_reward=per_step and algorithm.loss=rolegraph.losses."
            "policy.PolicyLoss, which weighs steps itself: give it as algorithm.loss.step_weight, or remove it",
        ),
        (
            ("orm", "prm"),
            {**PER_STEP, "loss": LossSpec("my.loss"), "score_weights": {"prm": 2.0}},
            "algorithm.score_weights.prm has no effect with prm_reward=per_step and algorithm.loss=my.loss, which "
            "weighs steps itself: give it as algorithm.loss.step_weight if that takes it, or remove it",
        ),
    ],
)
def test_reward_roles_have_a_say(roles: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    found = faults_with(roles, **options)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_prm_alone_is_enough() -> None:
    assert faults_with(("prm",)) == faults_with(("prm",), **PER_STEP) == []
    assert faults_with(("prm",), dynamic_sample=True) == []
    assert faults_with(("orm_judge",)) == []
    assert faults_with(("prm",), **PER_STEP, loss=LossSpec("my.loss")) == [], "it reads the steps itself"
    assert faults_with(("prm",), loss=LossSpec("my.loss"), score_weights={"prm": 2.0}) == [], "of one number a response"


def test_steps_are_scaled_as_rows_are() -> None:
    assert GRPOConfig(prm_reward="per_step").loss_spec().kwargs == {"step_scale": "group"}
    told = GRPOConfig(prm_reward="per_step", scale_rewards="batch", score_weights={"prm": 0.5}).loss_spec().kwargs
    assert told == {"step_scale": "batch", "step_weight": 0.5}
    assert GRPOConfig(prm_reward="mean").loss_spec().kwargs == {}
