"""The GRPO loop over roles in memory: the order of calls, what reaches the trainer, and what is logged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolegraph.algorithms.config import GRPOConfig, WarmStartConfig
from rolegraph.algorithms.grpo import GRPO, first_groups, optimizer_batches
from rolegraph.algorithms.scorers import Scorers
from rolegraph.batch import Batch, bytes_held
from rolegraph.errors import BatchError
from rolegraph.interfaces import LossSpec, ORMRole, PRMRole, RolloutRole, TeacherRole, TrainRole
from rolegraph.placement import PlacementConfig
from tests.rolegraph.algorithms.fakes import World, away

TWO_BY_TWO = GRPOConfig(global_batch_size=4, num_generations=2, scale_rewards="none", max_completion_length=9)
"""Two prompts a generation, two samples each, one step."""


async def run(rewards: list[list[float | None]], max_steps: int | None = 1, rows: int = 8, **options: Any) -> World:
    return await World(GRPO, replace(TWO_BY_TWO, **options), rewards=rewards, max_steps=max_steps, rows=rows).run()


def test_roles_come_from_the_annotations() -> None:
    needed = {"train": (TrainRole, False), "rollout": (RolloutRole, False)}
    taken = {"orm": (ORMRole, True), "prm": (PRMRole, True), "teacher": (TeacherRole, True)}
    assert GRPO.roles() == needed | taken
    assert GRPO.interface_of("orm_judge") is ORMRole


async def test_the_order_of_calls() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], max_steps=2)
    once = ["generate", "score", "step"]
    assert world.calls == ["sync 1", *once, "log 1", "sync 2", *once, "log 2"]
    assert world.telemetry.stages == [("grpo", 2)]
    assert world.telemetry.phases == ["sync", "generate", "score", "train"] * 2


async def test_advantages_reach_the_trainer() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]])
    batch, loss, temperature, lr = world.train.steps[0]
    assert batch.numpy("advantage").tolist() == [0.5, -0.5, 1.0, -1.0]
    assert batch["uid"].to_pylist() == ["p0", "p0", "p1", "p1"]
    assert batch["group"].to_pylist() == [0, 0, 1, 1]
    assert {"prompt_ids", "response_ids", "rollout_logprobs", "length"} <= set(batch.column_names)
    assert "logprobs" not in batch, "one step a generation compares with the current logprobs"
    assert (loss, temperature, lr) == (LossSpec("rolegraph.losses.policy.PolicyLoss", {}), 1.0, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale_rewards": None}, [0.5 / (0.5**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)]),
        ({"advantage_estimator": "rloo"}, [1.0, 2.0]),
        ({"advantage_estimator": "reinforce_plus_plus"}, [-1.25, 2.75]),
        (
            {"scale_rewards": "batch"},
            [0.5 / (np.std([1, 0, 5, 3], ddof=1) + 1e-4), 1 / (np.std([1, 0, 5, 3], ddof=1) + 1e-4)],
        ),
    ],
)
async def test_estimators_and_scales(options: dict[str, Any], expected: list[float]) -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], **options)
    assert world.train.steps[0][0].numpy("advantage")[[0, 2]] == pytest.approx(expected)


async def test_token_columns_stay_where_they_are() -> None:
    before = bytes_held()
    world = await run([[1.0, 0.0] * 4], steps_per_generation=2, num_iterations=2, beta=0.1, max_steps=8)
    assert bytes_held() == before
    batch = world.train.steps[0][0]
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "logprobs", "ref_logprobs"):
        with pytest.raises(BatchError):
            batch[name]


async def test_generations_are_cut_into_steps_of_whole_groups_and_gone_over_again() -> None:
    rewards = [[1.0, 0.0] * 4]
    world = await run(rewards, steps_per_generation=2, num_iterations=2, max_steps=8)
    assert world.dataset.asked == [(4, 3)]
    assert world.trained("group") == [[0, 0, 1, 1], [2, 2, 3, 3]] * 4
    one = ["generate", "score", "logprobs at 1.0"]
    steps = [call for n in range(1, 5) for call in ("step", f"log {n}")]
    more = [call for n in range(5, 9) for call in ("step", f"log {n}")]
    assert world.calls == ["sync 1", *one, *steps, "sync 2", *one, *more]
    assert world.trained("uid")[4] == ["p4", "p4", "p5", "p5"]
    assert all("logprobs" in batch for batch, *_ in world.train.steps)


async def test_the_run_ends_in_the_middle_of_a_generation() -> None:
    world = await run([[1.0, 0.0] * 4], steps_per_generation=2, num_iterations=2, max_steps=3)
    assert len(world.train.steps) == 3
    assert world.calls.count("generate") == 1


@pytest.mark.parametrize(("iterations", "steps"), [(1, 4), (2, 8)])
async def test_without_max_steps_it_is_one_pass(iterations: int, steps: int) -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], max_steps=None, num_iterations=iterations)
    assert len(world.train.steps) == steps
    assert [p["uid"].to_pylist() for p in world.rollout.prompts] == [[f"p{i}", f"p{i + 1}"] for i in (0, 2, 4, 6)]


async def test_sampling_follows_the_config() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], max_steps=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, beta=0.2)
    first, second = world.rollout.sampling
    assert (first.n, first.temperature, first.top_p, first.top_k, first.min_p) == (2, 0.7, 0.9, 5, 0.1)
    assert (first.max_tokens, first.seed, first.step, second.step) == (9, 3, 0, 1)
    assert world.train.steps[0][2] == 0.7, "the loss's logprobs are at the sampling temperature"
    assert "ref_logprobs at 0.7" in world.calls


async def test_null_rewards_are_left_out_and_empty_groups_named() -> None:
    world = await run([[1.0, None, None, None]], num_generations=2)
    assert world.trained("uid") == [["p0"]]
    assert world.trained("advantage") == [[0.0]]
    assert world.telemetry.events == ["dropped, no sample has a reward: p1"]
    metrics = world.telemetry.steps[0][1]
    assert metrics["reward/null"] == 3.0
    assert metrics["reward/faults"] == 3.0
    assert metrics["groups/empty"] == 1.0
    assert metrics["rows/dropped"] == 3.0
    assert metrics["reward/mean"] == 1.0


async def test_without_any_reward_the_step_is_left_out_and_the_run_ends() -> None:
    world = await run([[None] * 4], max_steps=2, beta=0.1, num_iterations=1)
    assert world.train.steps == []
    assert world.telemetry.metric("step/left_out") == [1.0, 1.0]
    assert [call for call in world.calls if call.startswith("ref")] == []


async def test_overlong_samples_count_in_their_group_and_not_in_the_loss() -> None:
    config = replace(TWO_BY_TWO, overlong_filter=True)
    world = World(GRPO, config, rewards=[[1.0, 0.0, 5.0, 3.0]])
    world.rollout.lengths = lambda row: 9 if row in (1, 2) else 4
    await world.run()
    assert world.trained("advantage") == [[0.5, -1.0]]
    assert world.trained("finish_reason") == [["stop", "stop"]]
    metrics = world.telemetry.steps[0][1]
    assert metrics["response_length/truncated"] == 0.5
    assert metrics["rows/dropped"] == 2.0
    plain = World(GRPO, TWO_BY_TWO, rewards=[[1.0, 0.0, 5.0, 3.0]])
    plain.rollout.lengths = world.rollout.lengths
    await plain.run()
    assert plain.trained("advantage") == [[0.5, -0.5, 1.0, -1.0]]


async def test_dynamic_sampling_replaces_groups_without_spread() -> None:
    rewards: list[list[float | None]] = [[1.0, 1.0, 5.0, 3.0], [0.1 + 0.2, 0.3, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0]]
    world = await run(rewards, dynamic_sample=True)
    assert world.trained("uid") == [["p1", "p1", "p4", "p4"]], "p5 has spread, too, and there was no room"
    assert world.trained("advantage") == [[1.0, -1.0, 0.5, -0.5]]
    assert world.trained("group") == [[1, 1, 4, 4]]
    assert [s.step for s in world.rollout.sampling] == [0, 1, 2]
    metrics = world.telemetry.steps[0][1]
    assert metrics["resample/rounds"] == 2.0
    assert metrics["groups/equal"] == 0.5
    assert metrics["rows/drawn"] == 12.0
    assert metrics["rows/dropped"] == 8.0
    assert metrics["reward/mean"] == pytest.approx(14.6 / 12)
    assert (await run(rewards)).trained("uid") == [["p0", "p0", "p1", "p1"]]


@pytest.mark.parametrize(("times", "rounds"), [(None, 4), (1, 2)])
async def test_dynamic_sampling_gives_up_and_trains_on_what_there_is(times: int | None, rounds: int) -> None:
    world = await run([[1.0, 1.0, 5.0, 3.0], [0.0] * 4], dynamic_sample=True, max_resample_times=times)
    assert world.calls.count("generate") == rounds
    assert world.trained("uid") == [["p1", "p1"]]


async def test_dynamic_sampling_stops_when_there_are_enough() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], dynamic_sample=True)
    assert world.calls.count("generate") == 1


async def test_kl_comes_off_the_rewards_of_rows() -> None:
    config = replace(TWO_BY_TWO, beta=0.5, kl_in_reward=True)
    world = World(GRPO, config, rewards=[[1.0, 0.0, 5.0, 3.0]])
    world.train.ref_kl = lambda batch: np.array([2.0, 0.0, 0.0, 4.0])
    await world.run()
    assert world.calls[3:6] == ["logprobs at 1.0", "ref_logprobs at 1.0", "step"]
    assert world.trained("advantage") == [[0.0, 0.0, 2.0, -2.0]]
    assert "beta" not in world.train.steps[0][1].kwargs, "it is not added to the loss again"


async def test_reinforce_plus_plus_leaves_kl_returns_to_the_trainer() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], beta=0.5, kl_in_reward=True, advantage_estimator="reinforce_plus_plus")
    batch, loss, *_ = world.train.steps[0]
    assert loss.kwargs == {"beta": 0.5, "kl_returns": "none"}
    assert batch.numpy("reward").tolist() == [1.0, 0.0, 5.0, 3.0]
    assert {"logprobs", "ref_logprobs"} <= set(batch.column_names)


async def test_the_entropy_quantile_asks_for_entropies() -> None:
    world = await run([[1.0, 0.0, 5.0, 3.0]], top_entropy_quantile=0.2)
    assert "logprobs at 1.0 entropy" in world.calls
    assert "entropy" in world.train.steps[0][0]


async def test_a_loss_of_its_own_reaches_the_trainer() -> None:
    loss = LossSpec("my.loss", {"beta": 0.1})
    world = await run([[1.0, 0.0, 5.0, 3.0]], loss=loss)
    assert world.train.steps[0][1] is loss
    assert "ref_logprobs at 1.0" in world.calls


@pytest.mark.parametrize("beta", [0.0, 0.1])
async def test_the_warm_start_comes_first(beta: float) -> None:
    warm = WarmStartConfig(max_steps=2, global_batch_size=3, lr=1e-3)
    world = await run([[1.0, 0.0, 5.0, 3.0]], warm_start=warm, beta=beta)
    saved = ["save_reference"] if beta else []
    first = ["step", "log 1", "step", "log 2", "reset_optimizer", *saved, "sync 1", "generate"]
    assert world.calls[: len(first)] == first
    assert world.telemetry.stages == [("warm_start", 2), ("grpo", 1)]
    batch, loss, _, lr = world.train.steps[0]
    assert (batch["uid"].to_pylist(), lr) == (["p0", "p1", "p2"], 1e-3)
    assert loss.target == "rolegraph.losses.supervised.cross_entropy"
    assert set(world.rollout.prompts[0].column_names) == {"uid", "prompt_ids", "prompt_length", "answer", "group"}


async def test_what_is_logged() -> None:
    world = World(GRPO, replace(TWO_BY_TWO, num_iterations=2), rewards=[[1.0, 1.0, 5.0, 3.0]], max_steps=2)
    world.rollout.lengths = lambda row: [1, 2, 3, 9][row]
    await world.run()
    (_, first), (_, second) = world.telemetry.steps
    step = {"loss": 0.5, "tokens": 15.0, "seconds/optimizer_step": 1.25}
    assert second == step
    assert first == step | {
        "reward/mean": 2.5,
        "reward/std": pytest.approx(np.std([1, 1, 5, 3])),
        "reward/null": 0.0,
        "reward/faults": 0.0,
        "rewards/exact/mean": 2.5,
        "groups/count": 2.0,
        "groups/equal": 0.5,
        "groups/empty": 0.0,
        "response_length/mean": 3.75,
        "response_length/max": 9.0,
        "response_length/min": 1.0,
        "response_length/truncated": 0.25,
        "weight_version": 1.0,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
        "rows/drawn": 4.0,
        "rows/dropped": 0.0,
    }
    ((at, samples),) = world.telemetry.sampled
    assert at == 1
    assert "advantage" in samples


def test_optimizer_batches_are_as_equal_as_can_be() -> None:
    batch = away({"group": np.repeat(np.array([4, 1, 9], np.int32), 2)})
    assert [b["group"].to_pylist() for b in optimizer_batches(batch, 2, 1)] == [[4, 4, 1, 1], [9, 9]]
    assert [len(b) for b in optimizer_batches(batch, 4, 1)] == [2, 2, 2, 0]


def test_first_groups() -> None:
    batch = Batch.from_columns({"group": np.array([1, 1, 4, 6, 6], np.int32)})
    assert first_groups(batch, 2)["group"].to_pylist() == [1, 1, 4]
    assert len(first_groups(batch, 3)) == 5


def taught(rewards: bool = True, **options: Any) -> World:
    """GRPO with a teacher, with rewards or without."""
    roles = {name: options.pop(name) for name in ("teachers", "teacher") if name in options}
    config = replace(TWO_BY_TWO, teacher_kl_coef=0.5, **options)
    world = World(GRPO, config, rewards=[[1.0, 0.0, 5.0, 3.0]], max_steps=2, **roles or {"teachers": ["teacher"]})
    if not rewards:
        world.algorithm.scorers = Scorers({})
    return world


async def test_a_teacher_scores_samples_beside_their_rewards() -> None:
    world = await taught().run()
    once = ["generate", "score", "teacher scores 4", "step"]
    assert world.calls == ["sync 1", *once, "log 1", "sync 2", *once, "log 2"]
    (batch, loss, *_) = world.train.steps[0]
    assert "teacher_token_logprobs" in batch
    assert batch.numpy("advantage").tolist() == [0.5, -0.5, 1.0, -1.0], "rewards are compared as ever"
    assert loss.kwargs == {"teacher_kl_coef": 0.5}
    assert [(topk, hidden, at) for _, topk, hidden, at in world.teacher.asked] == [(0, False, 1.0)] * 2


async def test_a_teacher_scores_no_sample_that_is_dropped() -> None:
    world = taught(dynamic_sample=True)
    world.orm.rewards = [[1.0, 0.0, 5.0, 5.0], [1.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 2.0]]
    await world.run()
    assert world.calls.count("generate") == 3, "one group of the first round has no spread, and one of the second"
    assert [len(batch) for batch, *_ in world.teacher.asked] == [4, 4]
    assert world.trained("group") == [[0, 0, 3, 3], [0, 0, 1, 1]]


async def test_a_teacher_without_rewards_and_groups_of_one() -> None:
    world = await taught(rewards=False, num_generations=1).run()
    assert world.calls == [c for n in (1, 2) for c in (f"sync {n}", "generate", "teacher scores 4", "step", f"log {n}")]
    (batch, *_) = world.train.steps[0]
    assert batch.numpy("advantage").tolist() == [0.0] * 4
    assert "reward/mean" not in world.telemetry.steps[0][1], "there are none to report"


async def test_the_policy_as_its_own_teacher_in_rl() -> None:
    world = await taught(teacher="average").run()
    once = ["generate", "score", "teach with average", "step", "average 0.99"]
    assert world.calls == ["average 0.99", "sync 1", *once, "log 1", "sync 2", *once, "log 2"]


async def test_rewards_of_several_roles_are_added_up_by_weight() -> None:
    config = replace(TWO_BY_TWO, score_weights={"prm": 2.0, "orm_judge": 0.5})
    world = World(
        GRPO,
        config,
        rewards=[[1.0, 0.0, 3.0, None]],
        prm=[0.25, 0.5, 0.75, None],
        orms={"orm_judge": [2.0, 4.0, 2.0, None]},
    )
    await world.run()
    (_, batch), *_ = world.telemetry.sampled
    assert batch["reward"].to_pylist() == [1.0 + 0.5 + 1.0, 1.0 + 2.0, 3.0 + 1.5 + 1.0]
    assert batch.numpy("advantage").tolist() == [-0.25, 0.25, 0.0]
    assert batch["scores/prm"].to_pylist() == [0.25, 0.5, 0.75]
    assert batch["scores/orm_judge"].to_pylist() == batch["rewards/orm_judge/exact"].to_pylist() == [2.0, 4.0, 2.0]
    assert batch["rewards/exact"].to_pylist() == [1.0, 0.0, 3.0], "no two roles share a column"
    assert world.prm is not None
    assert world.prm.reduces == ["min"]
    (metrics,) = [metrics for _, metrics in world.telemetry.steps]
    assert metrics["scores/prm/mean"] == pytest.approx(0.5)
    assert metrics["scores/orm/null"] == 1.0
    assert metrics["rewards/orm_judge/exact/mean"] == pytest.approx(8 / 3)


async def test_a_score_that_is_missing_is_no_zero_in_the_sum() -> None:
    """The best response, which the judge could not tell, would come last of its group."""
    world = World(GRPO, TWO_BY_TWO, rewards=[[1.0, 1.0, 1.0, None]], orms={"orm_judge": [4.0, 5.0, None, 2.0]})
    await world.run()
    (_, batch), *_ = world.telemetry.sampled
    assert batch["reward"].to_pylist() == [5.0, 6.0], "rows that one of them did not score are left out"
    (metrics,) = [metrics for _, metrics in world.telemetry.steps]
    assert metrics["reward/null"] == 2.0


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("weights", "left_out", "total"),
    [
        ({}, [], [3.0, nan, nan, nan]),
        ({"prm": 0.0}, [], [1.0, 2.0, nan, nan]),
        ({"orm": 0.0, "prm": -1.0}, [], [-2.0, nan, -3.0, nan]),
        ({"orm": 0.0, "prm": 0.0}, [], [0.0] * 4),
        ({"orm": 3.0}, ["prm"], [3.0, 6.0, nan, nan]),
        ({}, ["orm", "prm"], [0.0] * 4),
    ],
)
def test_the_sum_of_a_row(weights: dict[str, float], left_out: list[str], total: list[float]) -> None:
    scorers = Scorers({"orm": Any, "prm": Any}, weights=weights, left_out=frozenset(left_out))  # type: ignore[dict-item]
    scores = {"orm": np.array([1.0, 2.0, nan, inf]), "prm": np.array([2.0, nan, 3.0, nan])}
    np.testing.assert_array_equal(scorers.total(scores, 4), total)


async def test_rewards_of_steps_stay_out_of_the_sum_and_reach_the_trainer() -> None:
    config = replace(TWO_BY_TWO, prm_reward="per_step", score_weights={"prm": 3.0})
    world = await World(GRPO, config, rewards=[[1.0, 0.0, 5.0, 3.0]], prm=[0.9, 0.1, 0.2, 0.3]).run()
    batch, loss, *_ = world.train.steps[0]
    assert batch.numpy("advantage").tolist() == [0.5, -0.5, 1.0, -1.0]
    assert {"step_scores", "step_ends"} <= set(batch.column_names)
    with pytest.raises(BatchError, match="object store"):
        _ = batch["step_scores"]
    assert loss.kwargs == {"step_scale": "none", "step_weight": 3.0}


async def test_reward_models_take_turns_with_those_that_share_their_device() -> None:
    placement = PlacementConfig(
        colocate_groups=(("train", "rollout", "prm", "orm"),),
        offload_model=True,
        offload_optimizer=True,
        offload_reward_model=True,
        sleep_level=1,
    )
    world = await World(GRPO, TWO_BY_TWO, rewards=[[1.0, 0.0, 5.0, 3.0]], prm=[1.0] * 4, placement=placement).run()
    generated = world.calls.index("generate")
    assert world.calls[generated:] == [
        *("generate", "score", "sleep 1", "onload prm", "prm scores"),
        *("offload prm", "onload model optimizer", "step", "log 1"),
    ]


async def test_a_role_that_fails_ends_the_step_with_its_own_error() -> None:
    world = World(GRPO, TWO_BY_TWO, rewards=[[1.0, 0.0, 5.0, 3.0]], prm=[1.0] * 4)

    async def score(batch: Batch, *, reduce: str) -> Batch:
        raise RuntimeError("no such model")

    world.prm.score = score  # type: ignore[union-attr, method-assign]
    with pytest.raises(RuntimeError, match="no such model"):
        await world.run()
    assert "step" not in world.calls


async def test_a_role_that_fails_ends_the_others_before_its_error_is_told() -> None:
    ended: list[str] = []

    class Slow:
        async def score(self, rows: Batch, *, reduce: str = "min") -> Batch:
            try:
                await asyncio.sleep(3600)
                raise AssertionError
            finally:
                await asyncio.sleep(0)  # as a turn is given back
                ended.append("slow")

    class Bad:
        async def score(self, rows: Batch) -> Batch:
            await asyncio.sleep(0)
            raise RuntimeError("no such model")

    scorers = Scorers({"prm": Slow(), "orm": Bad(), "orm_slow": Slow()})  # type: ignore[dict-item]
    world = World(GRPO, TWO_BY_TWO)
    world.algorithm.phases = {**world.algorithm.phases, **scorers.phases}
    with pytest.raises(RuntimeError, match="no such model"):
        await asyncio.wait_for(scorers.score(world.algorithm, Batch.from_columns({"uid": ["a"]})), 10)
    assert ended == ["slow", "slow"]
