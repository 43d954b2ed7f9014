"""The distillation loop over roles in memory: which steps are on whose responses, what a teacher is asked, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolegraph.algorithms import teachers
from rolegraph.algorithms.config import GKDConfig, SelfTeacherConfig, WarmStartConfig
from rolegraph.algorithms.gkd import GKD, is_on_policy
from rolegraph.algorithms.teachers import Ask, Teachers
from rolegraph.batch import Batch
from rolegraph.config.schema import Spec
from rolegraph.errors import ConfigError
from rolegraph.placement import PlacementConfig
from roles.teacher.config import HuggingFaceTeacherConfig
from tests.rolegraph.algorithms.fakes import Teacher, World, away

SMALL = GKDConfig(global_batch_size=4, gkd_logits_topk=8)


def world(max_steps: int = 1, **options: Any) -> World:
    names = ("teachers", "teacher", "teacher_temperature", "placement")
    others = {name: options.pop(name) for name in names if name in options}
    if not others.get("teacher"):
        others.setdefault("teachers", ["teacher"])
    made = World(GKD, replace(SMALL, **options), max_steps=max_steps, **others)
    made.algorithm.orm = None
    return made


async def test_the_order_of_calls_on_samples_of_its_own() -> None:
    run = await world(max_steps=2).run()
    once = ["generate", "teacher scores 4", "step"]
    assert run.calls == ["sync 1", *once, "log 1", "sync 2", *once, "log 2"]
    assert run.telemetry.phases == ["teacher_head", *["sync", "generate", "teacher", "train"] * 2]
    assert run.telemetry.metric("on_policy") == [1.0, 1.0]
    assert run.trained("uid") == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p6", "p7"]]


async def test_rewards_are_looked_at_and_teach_nothing() -> None:
    run = world()
    run.algorithm.orm = run.orm
    run.orm.rewards = [[1.0, 0.0, 1.0, 1.0]]
    await run.run()
    assert run.calls == ["sync 1", "generate", "score", "teacher scores 4", "step", "log 1"]
    assert run.telemetry.metric("reward/mean") == [0.75]


async def test_the_order_of_calls_on_dataset_responses() -> None:
    run = await world(max_steps=2, lmbda=0.0).run()
    assert run.calls == ["teacher scores 4", "step", "log 1", "teacher scores 4", "step", "log 2"]
    assert run.telemetry.metric("on_policy") == [0.0, 0.0]
    (batch, *_) = run.train.steps[0]
    assert batch["response_length"].to_pylist() == [1] * 4, "the dataset's own responses"


async def test_steps_are_drawn_by_seed_and_each_has_its_rows_of_the_dataset() -> None:
    run = await world(max_steps=20, lmbda=0.5, max_staleness=1).run()
    drawn = [float(is_on_policy(0.5, 3, step)) for step in range(1, 21)]
    assert run.telemetry.metric("on_policy") == drawn
    assert 0 < sum(drawn) < 20
    rows = [uid for step in run.trained("uid") for uid in step]
    assert rows == [f"p{n % 8}" for n in range(80)], "running ahead takes no rows from other steps"
    assert [batch["response_length"][0].as_py() for batch, *_ in run.train.steps] == [4 if own else 1 for own in drawn]


async def test_a_teacher_beside_the_trainer_has_its_turn_while_the_next_samples_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement = PlacementConfig(
        colocate_groups=(("train", "teacher"),), offload_model=True, offload_optimizer=True, offload_teacher_model=True
    )
    run = world(max_steps=3, max_staleness=1, placement=placement)
    step, generate = run.train.step, run.rollout.generate

    async def long_step(*args: Any, **options: Any) -> Any:
        found = await step(*args, **options)
        await asyncio.sleep(0.05)
        run.calls.append("stepped")
        return found

    async def generated(*args: Any) -> Any:
        await asyncio.sleep(0.02)
        return await generate(*args)

    monkeypatch.setattr(run.train, "step", long_step)
    monkeypatch.setattr(run.rollout, "generate", generated)
    await asyncio.wait_for(run.run(), 10)
    ahead = ["step", "generate", "stepped"]
    turn = ["offload model optimizer", "onload teacher", "teacher scores 4", "offload teacher"]
    start = run.calls.index("step")
    assert run.calls[start : start + 3] == ahead, "drawn beside the step"
    between = run.calls[start + 3 : run.calls.index("step", start + 1)]
    assert [call for call in between if call in turn] == turn, "and scored after it, in the memory it has left"
    assert run.calls.count("teacher scores 4") == run.calls.count("step") == 3


def test_the_draw_has_the_share_it_is_asked_for_and_depends_on_nothing_else() -> None:
    steps = range(4000)
    share = np.mean([is_on_policy(0.3, 7, step) for step in steps])
    assert abs(share - 0.3) < 0.03
    assert not any(is_on_policy(0.0, 7, step) for step in steps)
    assert all(is_on_policy(1.0, 7, step) for step in steps)
    assert [is_on_policy(0.3, 8, step) for step in steps] != [is_on_policy(0.3, 7, step) for step in steps]


async def test_what_the_teacher_is_asked_and_what_the_loss_is_told() -> None:
    run = await world(gkd_logits_topk=16, topk_mode="tail", temperature=0.7, beta=1.0, sft_alpha=0.5, lmbda=0.0).run()
    (_, topk, hidden, temperature) = run.teacher.asked[0]
    assert (topk, hidden, temperature) == (16, False, 0.7)
    (_, loss, at, _) = run.train.steps[0]
    assert at == 0.7
    assert loss.kwargs == {"beta": 1.0, "topk_mode": "tail", "sft_alpha": 0.5, "teacher_temperature": None}
    own = await world(sft_alpha=0.5, lmbda=1.0, teacher_temperature=1.0).run()
    assert own.train.steps[0][1].kwargs["sft_alpha"] == 0.0, "there is nothing to imitate in a sample of its own"
    assert own.train.steps[0][1].kwargs["teacher_temperature"] == 1.0, "that of an engine's prompt logprobs"
    asked = await world(temperature=0.7, teacher_temperature=1.0).run()
    assert asked.teacher.asked[0][3] == 1.0, "such an engine refuses any other"
    assert asked.train.steps[0][2] == 0.7


async def test_teachers_of_which_one_knows_no_temperature_are_all_asked_for_the_one_it_has() -> None:
    run = await world(temperature=0.7, teacher_temperature=1.0).run()
    assert run.teacher.asked[0][3] == 1.0, "as the loss is told"
    assert run.train.steps[0][1].kwargs["teacher_temperature"] == 1.0
    assert run.train.steps[0][2] == 0.7
    assert run.rollout.sampling[0].temperature == 0.7


def test_a_phase_in_which_the_policy_and_others_teach_wakes_them_all() -> None:
    own: Any = teachers.SelfTeacher(SelfTeacherConfig(), None)  # type: ignore[arg-type]
    phases = Teachers({"teacher": own, "teacher_b": Teacher([], "teacher_b")}).phases  # type: ignore[dict-item]
    assert phases["teach"].needs == {"train": ("model",), "teacher_b": ("model",)}
    assert phases["teacher_head"].needs == phases["teach"].needs
    assert phases["teacher"].needs == {"teacher_b": ("model",)}


async def test_a_row_without_its_teacher_is_found_before_the_first_step() -> None:
    run = world(teachers=["teacher", "teacher_b"], warm_start=WarmStartConfig(max_steps=2))
    with pytest.raises(ConfigError, match="2 teachers take part"):
        await run.run()
    assert run.calls == []


async def test_whole_vocabularies_need_the_head_once_and_hidden_states_each_step() -> None:
    run = await world(max_steps=2, gkd_logits_topk=None).run()
    assert run.calls[0] == "head of teacher"
    assert run.calls.count("head of teacher") == 1
    assert [(topk, hidden) for _, topk, hidden, _ in run.teacher.asked] == [(0, True)] * 2
    assert all("teacher_hidden" in batch for batch, *_ in run.train.steps)


async def test_files_of_samples_hold_the_logprobs_of_the_tokens_and_nothing_larger_of_a_teacher() -> None:
    for topk in (None, 16):
        run = await world(gkd_logits_topk=topk).run()
        ((_, batch),) = run.telemetry.sampled
        found = {name for name in batch.column_names if name.startswith("teacher")}
        assert found == {"teacher_token_logprobs"}


async def test_the_policy_as_its_own_teacher_scores_after_it_has_drawn() -> None:
    run = await world(max_steps=2, teacher="average", gkd_logits_topk=None).run()
    once = ["generate", "teach with average", "step", "average 0.99"]
    assert run.calls == ["average 0.99", "head of average", "sync 1", *once, "log 1", "sync 2", *once, "log 2"]
    ahead = await world(max_steps=3, teacher="current", max_staleness=1).run()
    scored = [n for n, call in enumerate(ahead.calls) if call == "teach with current"]
    stepped = [n for n, call in enumerate(ahead.calls) if call == "step"]
    assert all(before + 1 == after for before, after in zip(scored, stepped, strict=True)), "the weights of now"


async def test_a_warm_start_ends_in_the_weights_that_teach() -> None:
    run = await world(teacher="initial", warm_start=WarmStartConfig(max_steps=2)).run()
    assert run.calls[:6] == ["step", "log 1", "step", "log 2", "reset_optimizer", "save_reference"]


async def test_rows_go_to_the_teacher_they_name_and_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "ROWS_A_CALL", 2)
    calls: list[str] = []
    roles: dict[str, Any] = {role: Teacher(calls, role) for role in ("teacher", "teacher_b")}
    rows = away({"uid": list("vwxyz"), "teacher_key": ["b", None, "b", None, "b"], "prompt_ids": [[1]] * 5})
    scored = await Teachers(roles).score(rows, Ask())
    assert scored["uid"].to_pylist() == list("vwxyz")
    assert scored["mark"].to_pylist() == [9.0, 7.0, 9.0, 7.0, 9.0]
    assert sorted(calls) == ["teacher scores 2", "teacher_b scores 1", "teacher_b scores 2"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "2 teachers take part (teacher, teacher_b), and the dataset has no column teacher_key"),
        ({"teacher_key": ["b", "c"]}, "row w has teacher_key=c, and this run has no role teacher_c"),
    ],
)
async def test_a_row_whose_teacher_nobody_knows(columns: dict[str, Any], message: str) -> None:
    roles: dict[str, Any] = {role: Teacher([], role) for role in ("teacher", "teacher_b")}
    rows = Batch.from_columns({"uid": ["v", "w"], "prompt_ids": [[1], [2]], **columns})
    with pytest.raises(ConfigError) as caught:
        await Teachers(roles).score(rows, Ask())
    assert message in str(caught.value)


class EngineConfig:
    """A teacher that gives top-K logprobs of temperature 1."""


def faults(teacher: Any = None, rollout: bool = True, more: str = "", **options: Any) -> list[str]:
    roles = {"train": None, "teacher": Spec("a.VLLMTeacher", teacher or HuggingFaceTeacherConfig())}
    if more:
        roles[more] = Spec("a.HuggingFaceTeacher", HuggingFaceTeacherConfig())
    if rollout:
        roles["rollout"] = None
    return list(GKDConfig(**options).check(SimpleNamespace(roles=roles)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gkd_logits_topk": 0}, "algorithm.gkd_logits_topk=0 must be at least 1, or null for the whole vocabulary"),
        ({"gkd_logits_topk": -3}, "algorithm.gkd_logits_topk=-3 must be at least 1"),
        ({"gkd_logits_topk": 1}, "algorithm.gkd_logits_topk=1 renormalised carries no signal"),
        ({"topk_mode": "tail"}, "algorithm.topk_mode=tail has no effect without gkd_logits_topk"),
        ({"teacher": EngineConfig()}, "algorithm.gkd_logits_topk=null compares the whole vocabulary, and"),
        (
            {"teacher": EngineConfig(), "gkd_logits_topk": 8, "topk_mode": "tail", "temperature": 0.9},
            "algorithm.topk_mode=tail at temperature=0.9 needs teacher logprobs at that temperature",
        ),
        (
            {"more": "teacher_math"},
            "algorithm.gkd_logits_topk=null compares the whole vocabulary, for which the trainer holds the head of one "
            "teacher, and there are 2 (teacher, teacher_math)",
        ),
        ({"sft_alpha": 0.1}, "algorithm.sft_alpha=0.1 has no effect with lmbda=1"),
        ({"rollout": False}, "algorithm.lmbda=1 asks for samples: set rollout=vllm, or algorithm.lmbda=0"),
        (
            {"lmbda": 0.0, "rollout": False, "max_staleness": 1},
            "algorithm.max_staleness=1 has no effect with lmbda=0: remove it",
        ),
        ({"on_sync": "drain"}, "algorithm.on_sync has no effect with max_staleness=0"),
    ],
)
def test_illegal_combinations(options: dict[str, Any], message: str) -> None:
    found = faults(**options)
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gkd_logits_topk": 1, "topk_mode": "tail"},
        {"lmbda": 0.5, "sft_alpha": 0.1},
        {"lmbda": 0.0, "rollout": False},
        {"teacher": EngineConfig(), "gkd_logits_topk": 8, "temperature": 0.9},
        {"teacher": SelfTeacherConfig(weights="average")},
        {"more": "teacher_math", "gkd_logits_topk": 8},
    ],
)
def test_legal_combinations(options: dict[str, Any]) -> None:
    assert faults(**options) == []


def test_a_beta_near_an_end_is_remarked_upon() -> None:
    assert "algorithm.beta=0.005" in GKDConfig(beta=0.005).note
    assert GKDConfig(beta=0.0).note == GKDConfig(beta=0.5).note == GKDConfig(beta=1.0).note == ""
