"""Who sleeps and who wakes over the steps of an algorithm, for each setting of placement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolegraph.algorithms.config import GRPOConfig, SFTConfig, WarmStartConfig
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.sft import SFT
from rolegraph.batch import Batch
from rolegraph.errors import StalenessError, TurnError
from rolegraph.interfaces import SamplingParams
from rolegraph.placement import PlacementConfig
from tests.rolegraph.algorithms.fakes import World

REWARDS = [[1.0, 0.0, 5.0, 3.0]]
CONFIG = GRPOConfig(global_batch_size=4, num_generations=2, max_completion_length=9)
TOGETHER = PlacementConfig(colocate_groups=(("train", "rollout", "orm"),))

STAYS: dict[str, list[str]] = {"start": [], "sync": [], "again": [], "generate": [], "train": []}
ALL = {
    "start": ["offload model optimizer", "sleep {level}"],
    "sync": ["onload model", "wake weights"],
    "again": ["offload optimizer", "wake weights"],
    "generate": ["offload model", "wake kv_cache"],
    "train": ["sleep {level}", "onload model optimizer"],
}
"""What comes before each phase; `again` is a sync after training."""
SETTINGS: list[tuple[PlacementConfig, dict[str, list[str]]]] = [
    (TOGETHER, STAYS),
    (replace(TOGETHER, offload_model=True, offload_optimizer=True, sleep_level=1), ALL),
    (replace(TOGETHER, offload_model=True, offload_optimizer=True, sleep_level=2), ALL),
    (
        replace(TOGETHER, offload_optimizer=True),
        STAYS | {"start": ["offload optimizer"], "generate": ["offload optimizer"], "train": ["onload optimizer"]},
    ),
    (
        replace(TOGETHER, offload_model=True),
        STAYS
        | {
            "start": ["offload model"],
            "sync": ["onload model"],
            "generate": ["offload model"],
            "train": ["onload model"],
        },
    ),
    (
        replace(TOGETHER, sleep_level=2),
        {**ALL, "start": ["sleep 2"], "sync": ["wake weights"], "again": ["wake weights"]}
        | {"generate": ["wake kv_cache"], "train": ["sleep {level}"]},
    ),
    (PlacementConfig(offload_model=True, offload_optimizer=True, sleep_level=2), STAYS),
]


@pytest.mark.parametrize(("placement", "moves"), SETTINGS)
async def test_the_order_of_sleep_and_work_over_two_steps(
    placement: PlacementConfig, moves: dict[str, list[str]]
) -> None:
    world = await World(GRPO, CONFIG, rewards=REWARDS, max_steps=2, placement=placement).run()
    first_generate = moves["generate"]
    if moves["start"] == ["offload optimizer"]:
        first_generate = []  # away since the start

    def step(number: int, sync: str, generate: list[str]) -> list[str]:
        work = [f"sync {number}", *generate, "generate", "score", *moves["train"], "step", f"log {number}"]
        return [*moves[sync], *work]

    expected = [*moves["start"], *step(1, "sync", first_generate), *step(2, "again", moves["generate"])]
    assert world.calls == [call.format(level=placement.sleep_level) for call in expected]
    moving = any(moves.values())
    assert ("turns" in world.telemetry.phases) == moving
    assert [name for name in world.telemetry.phases if name != "turns"] == ["sync", "generate", "score", "train"] * 2


async def test_scores_wake_the_weights_alone_and_a_warm_start_everything() -> None:
    placement = SETTINGS[1][0]
    warm = WarmStartConfig(max_steps=1, global_batch_size=2)
    config = replace(CONFIG, beta=0.1, num_iterations=2, warm_start=warm)
    world = await World(GRPO, config, rewards=REWARDS, max_steps=2, placement=placement).run()
    assert world.calls == [
        "offload model optimizer",
        "sleep 1",
        "onload model optimizer",
        *("step", "log 1", "reset_optimizer", "save_reference"),
        *("offload optimizer", "wake weights", "sync 1"),
        *("offload model", "wake kv_cache", "generate", "score"),
        *("sleep 1", "onload model", "logprobs at 1.0", "ref_logprobs at 1.0"),
        *("onload optimizer", "step", "log 1", "step", "log 2"),
    ]


async def test_a_step_without_training_lets_the_cache_go_for_the_next_sync() -> None:
    placement = SETTINGS[2][0]
    world = await World(GRPO, CONFIG, rewards=[[None] * 4], max_steps=2, placement=placement).run()
    second = world.calls[world.calls.index("log 1") + 1 :]
    assert second[:5] == ["sleep 2", "onload model", "wake weights", "sync 2", "offload model"]


class Forgetful(GRPO):
    """Leaves its second sync out."""

    async def sync(self) -> int:
        return await super().sync() if not self.rounds else self.job.sync.version + 1


async def test_a_forgotten_sync_is_noticed_before_the_generation_where_the_weights_are_gone() -> None:
    deep, light = SETTINGS[2][0], SETTINGS[1][0]
    with pytest.raises(TurnError, match="phase generate needs the weights of rollout"):
        await World(Forgetful, CONFIG, rewards=REWARDS, max_steps=2, placement=deep).run()
    with pytest.raises(StalenessError, match="an engine has missed a sync"):
        await World(Forgetful, CONFIG, rewards=REWARDS, max_steps=2, placement=light).run()


async def test_a_failing_sync_leaves_the_weights_gone() -> None:
    world = World(GRPO, CONFIG, rewards=REWARDS, placement=SETTINGS[2][0])

    async def broken() -> float:
        raise ZeroDivisionError

    world.sync.sync = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await world.run()
    prompts = Batch.from_columns({"uid": ["a"], "prompt_ids": [[1]]})
    with pytest.raises(TurnError, match="dropped"):
        async with world.algorithm.turn("generate"):
            await world.rollout.generate(prompts, SamplingParams())


async def test_a_phase_nobody_knows() -> None:
    world = World(SFT, SFTConfig(global_batch_size=2))
    with pytest.raises(TurnError, match=r"SFT has no phase 'judge'; its phases are generate, sync, train"):
        async with world.algorithm.turn("judge"):
            pass
