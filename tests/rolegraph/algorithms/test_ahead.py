"""Generations beside training: what may begin when, what reaches the trainer, and how it all ends."""

from __future__ import annotations

import asyncio
import signal
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from rolegraph.algorithms.ahead import Generations
from rolegraph.algorithms.config import GRPOConfig, WarmStartConfig
from rolegraph.algorithms.grpo import GRPO
from rolegraph.batch import Batch
from rolegraph.errors import RoleError, StalenessError, StoppedError
from rolegraph.interfaces import LossSpec, SamplingParams
from rolegraph.staleness import Staleness
from tests.rolegraph.algorithms.fakes import Rollout, World

ONE_AHEAD = GRPOConfig(
    global_batch_size=4, num_generations=2, scale_rewards="none", max_completion_length=9, max_staleness=1
)
REWARDS = [[1.0, 0.0, 5.0, 3.0]]
TRUNCATE = {"rollout_importance_correction": "truncate"}


def world_of(max_steps: int | None = 4, rows: int = 16, **options: Any) -> World:
    rewards = options.pop("rewards", REWARDS)
    return World(GRPO, replace(ONE_AHEAD, **options), rewards=rewards, max_steps=max_steps, rows=rows)


class Gated(Rollout):
    """Notes when a generation begins and ends, and lets it end when it is told to."""

    def __init__(self, world: World) -> None:
        super().__init__(world.calls, world.sync)
        self.gate = asyncio.Semaphore(0)

    async def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        drawn = await super().generate(prompts, sampling)  # with the version of now, as an engine dates first tokens
        await self.gate.acquire()
        self.calls.append("generated")
        return drawn


def gated(world: World) -> Gated:
    rollout = world.algorithm.rollout = world.rollout = Gated(world)
    return rollout


async def settle(world: World) -> list[str]:
    """What happened until nothing moves any more."""
    before: int | None = None
    while before != len(world.calls):
        before = len(world.calls)
        for _ in range(20):
            await asyncio.sleep(0)
    calls = list(world.calls)
    world.calls.clear()
    return calls


async def test_the_next_generation_begins_before_training() -> None:
    world = world_of()
    rollout = gated(world)
    run = asyncio.create_task(world.run())
    assert await settle(world) == ["sync 1", "generate"]
    rollout.gate.release()
    step = ["generated", "score", "generate", "step", "log 1", "sync 2"]
    assert await settle(world) == step, "the second generation has begun with version 1, and waits"
    rollout.gate.release()
    assert await settle(world) == ["generated", "score", "generate", "step", "log 2", "sync 3"]
    rollout.gate.release()
    assert await settle(world) == ["generated", "score", "generate", "step", "log 3", "sync 4"]
    rollout.gate.release()
    assert await settle(world) == ["generated", "score", "step", "log 4"], "none is begun that nobody would train on"
    await run
    assert world.telemetry.metric("staleness/max") == [0.0, 1.0, 1.0, 1.0]
    assert world.telemetry.metric("staleness/mean") == [0.0, 1.0, 1.0, 1.0]
    assert world.telemetry.metric("weight_version") == [1.0, 1.0, 2.0, 3.0]
    assert "wait" in world.telemetry.phases


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
async def test_generation_runs_ahead_as_far_as_it_may(limit: int) -> None:
    world = world_of(max_steps=6, max_staleness=limit)
    begun: list[int] = []

    async def step(batch: Batch, **_: Any) -> dict[str, float]:
        await settle(world)
        begun.append(len(world.rollout.prompts))
        return {}

    world.train.step = step  # type: ignore[method-assign]
    await world.run()
    assert begun == [min(n + limit, 6) for n in range(1, 7)]
    stale = world.telemetry.metric("staleness/max")
    assert stale == [float(min(n, limit)) for n in range(6)]


async def test_samples_reach_the_trainer_in_the_order_of_their_prompts() -> None:
    world = await world_of(max_steps=4).run()
    assert world.trained("uid") == [[f"p{i}", f"p{i}", f"p{i + 1}", f"p{i + 1}"] for i in (0, 2, 4, 6)]
    assert [s.step for s in world.rollout.sampling] == [0, 1, 2, 3], "no two generations share a seed"


async def test_the_loss_corrects_by_the_logprobs_of_the_rollout() -> None:
    world = await world_of().run()
    assert all(loss.kwargs == TRUNCATE for _, loss, *_ in world.train.steps)
    assert "logprobs" not in world.train.steps[0][0], "one step a generation: the ratio is against the weights of now"
    (note,) = world.telemetry.events
    assert note.startswith("max_staleness=1: the loss weighs each token by trainer / rollout probability")


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({"rollout_importance_correction": "mask"}, {"rollout_importance_correction": "mask"}),
        ({"rollout_importance_threshold": 3.0}, {"rollout_importance_threshold": 3.0, **TRUNCATE}),
        ({"loss": LossSpec("rolegraph.losses.policy.PolicyLoss", {"epsilon": 0.1})}, {"epsilon": 0.1, **TRUNCATE}),
        ({"loss": LossSpec("my.loss", {"power": 2})}, {"power": 2}),
        ({"max_staleness": 0}, {}),
    ],
)
def test_which_correction(options: dict[str, Any], kwargs: dict[str, Any]) -> None:
    config = replace(ONE_AHEAD, **options)
    assert dict(config.loss_spec().kwargs) == kwargs
    assert list(config.check(None)) == []
    told = {"my.loss": "my.loss has to correct for stale samples itself"}.get(config.loss_spec().target, "")
    assert told in config.staleness_note
    assert bool(config.staleness_note) == (config.max_staleness > 0 and "mask" not in kwargs.values())


async def test_old_logprobs_are_those_of_the_weights_that_train() -> None:
    """Several steps a generation: the ratio is against the trainer when it takes the samples, not when they began."""
    world = world_of(max_steps=8, rewards=[[1.0, 0.0] * 4], steps_per_generation=2, num_iterations=2)
    await world.run()
    calls = [call for call in world.calls if not call.startswith(("generate", "score", "log "))]
    assert calls == [
        *("sync 1", "logprobs at 1.0", *["step"] * 4),
        *("sync 2", "logprobs at 1.0", *["step"] * 4),
    ]
    assert world.calls.count("generate") == 2
    assert all("logprobs" in batch for batch, *_ in world.train.steps)
    assert world.telemetry.metric("staleness/max") == [0.0, None, None, None, 1.0, None, None, None]


async def test_the_run_ends_in_the_middle_of_a_generation() -> None:
    world = await world_of(max_steps=3, rewards=[[1.0, 0.0] * 4], steps_per_generation=2).run()
    assert len(world.train.steps) == 3
    assert world.calls.count("generate") == 2


async def test_dynamic_sampling_draws_further_prompts_ahead_too() -> None:
    rewards: list[list[float | None]] = [[1.0, 1.0, 5.0, 3.0], [0.0] * 4, [2.0, 1.0, 1.0, 0.0]]
    world = await world_of(max_steps=2, rewards=rewards, dynamic_sample=True).run()
    assert world.trained("uid") == [["p1", "p1", "p4", "p4"], ["p6", "p6", "p7", "p7"]]
    assert world.telemetry.metric("resample/rounds") == [2.0, 0.0]
    assert world.calls.count("generate") == 4


async def test_nothing_is_drawn_before_the_warm_start_has_reached_the_engines() -> None:
    world = await world_of(max_steps=1, warm_start=WarmStartConfig(max_steps=2)).run()
    assert world.calls[:7] == ["step", "log 1", "step", "log 2", "reset_optimizer", "sync 1", "generate"]


async def test_one_pass_over_the_dataset_ends() -> None:
    world = await world_of(max_steps=None, rows=8).run()
    assert len(world.train.steps) == 4


async def test_a_generation_that_fails_ends_the_run_at_once_with_its_cause() -> None:
    world = world_of()
    rollout, ended = gated(world), list[str]()

    async def step(batch: Batch, **_: Any) -> dict[str, float]:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("step")
        return {}

    async def score(batch: Batch) -> Batch:
        if world.orm.rounds:
            raise RoleError("no verdict", role="orm")
        return await type(world.orm).score(world.orm, batch)

    world.train.step = step  # type: ignore[method-assign]
    world.algorithm.orm.score = score
    run = asyncio.create_task(world.run())
    rollout.gate.release()
    await settle(world)
    assert not ended
    rollout.gate.release()
    with pytest.raises(RoleError, match="no verdict"):
        await asyncio.wait_for(run, 5)
    assert ended == ["step"], "the step that nobody waits for any more"


async def test_a_step_that_fails_ends_the_generation_beside_it() -> None:
    world = world_of()
    rollout = gated(world)

    async def step(batch: Batch, **_: Any) -> dict[str, float]:
        raise RoleError("out of memory", role="train")

    world.train.step = step  # type: ignore[method-assign]
    rollout.gate.release()
    with pytest.raises(RoleError, match="out of memory"):
        await world.run()
    assert world.calls.count("generate") == 2, "one was being drawn"
    rollout.gate.release()
    await settle(world)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_an_interrupted_run_leaves_nothing_running() -> None:
    world = world_of()
    gated(world).gate.release()
    run = asyncio.create_task(world.run())
    await settle(world)
    run.cancel()  # what asyncio.run does on Ctrl-C
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("limit", [0, 1])
async def test_rows_of_an_engine_that_no_sync_reaches_are_not_trained_on(limit: int) -> None:
    world = world_of(max_staleness=limit)
    world.rollout.sync = type(world.sync)([])
    with pytest.raises(StalenessError, match="an engine has missed a sync"):
        await world.run()
    assert len(world.train.steps) == limit, "version 0 is one behind the first, and two behind the second"


async def test_a_block_that_is_left_early_ends_the_generation_that_runs_beside_it() -> None:
    ended: list[str] = []

    async def make() -> tuple[Batch, dict[str, float]]:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("generation")
        raise AssertionError("it was not ended")

    async with Generations(make, Staleness(1), 3, nullcontext) as generations:
        generations.synced(1)
        await asyncio.sleep(0)
    assert ended == ["generation"]


async def test_what_ends_the_block_is_told_before_what_becomes_of_the_generation_beside_it() -> None:
    async def make() -> tuple[Batch, dict[str, float]]:
        try:
            await asyncio.sleep(3600)
        finally:
            raise RoleError("the call was broken off", role="rollout")

    with pytest.raises(StoppedError, match="asked to stop"):
        async with Generations(make, Staleness(1), 3, nullcontext) as generations:
            generations.synced(1)
            await asyncio.sleep(0)
            raise StoppedError("asked to stop", signal.SIGTERM)
