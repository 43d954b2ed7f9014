"""What algorithms say of themselves for a checkpoint is enough to go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rolegraph.algorithms.config import GKDConfig, GRPOConfig, SFTConfig, WarmStartConfig
from rolegraph.algorithms.gkd import GKD
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.algorithms.sft import PT, SFT
from rolegraph.batch import Batch
from rolegraph.checkpoints.state import State
from rolegraph.interfaces import SamplingParams
from tests.rolegraph.algorithms.fakes import Rollout, World

GROUPS = GRPOConfig(
    global_batch_size=4, num_generations=2, scale_rewards="none", max_completion_length=9, steps_per_generation=2
)
TWICE = replace(GROUPS, num_iterations=2)
WARM = WarmStartConfig(max_steps=3, global_batch_size=2)
DISTIL = GKDConfig(global_batch_size=2, gkd_logits_topk=8, lmbda=0.5)
STEPS = 9
REWARDS = [[1.0, 0.0, 5.0, 3.0, 2.0, 7.0, 1.0, 1.0]]


class EndError(Exception):
    """The process is killed."""


@dataclass
class Kill(Hook):
    """Takes the state behind a step over all stages, as a checkpoint holds it, and kills the run some steps later."""

    after: int
    later: int = 1
    seen: int = 0
    taken: tuple[Step, State, int] | None = None

    async def logged(self, algorithm: Any, step: Step) -> None:
        self.seen += 1
        for _ in range(50):
            await asyncio.sleep(0)  # what is made beside the steps is made meanwhile
        if self.seen == self.after:
            state = algorithm.state()
            values = json.loads(json.dumps(state.values))
            at = Step(step.stage, step.number, step.of, step.is_main)
            self.taken = at, State(values, state.rows), algorithm.job.sync.version
        if self.seen == self.after + self.later:
            raise EndError


Make = Callable[[], World]


def grpo(config: GRPOConfig, **options: Any) -> Make:
    return lambda: World(GRPO, config, rewards=REWARDS, rows=7, max_steps=STEPS, **options)


def gkd(config: GKDConfig, **options: Any) -> Make:
    def make() -> World:
        world = World(GKD, config, rows=5, max_steps=STEPS, **options)
        world.algorithm.orm = None
        return world

    return make


CASES: Mapping[str, Make] = {
    "sft": lambda: World(SFT, SFTConfig(global_batch_size=2), rows=5, max_steps=STEPS),
    "pt": lambda: World(PT, SFTConfig(global_batch_size=4), rows=5, max_steps=STEPS),
    "grpo": grpo(GROUPS),
    "grpo, gone over twice": grpo(TWICE),
    "grpo, dynamic": grpo(replace(GROUPS, dynamic_sample=True)),
    "grpo behind a warm start": grpo(replace(GROUPS, warm_start=WARM)),
    "grpo, taught by its average": grpo(replace(GROUPS, teacher_kl_coef=0.5), teacher="average"),
    "gkd": gkd(DISTIL, teachers=["teacher"]),
    "gkd behind a warm start": gkd(replace(DISTIL, warm_start=WARM), teachers=["teacher"]),
    "gkd, taught by its average": gkd(replace(DISTIL, gkd_logits_topk=None), teacher="average"),
}


def trained(world: World) -> list[Any]:
    """What the trainer was given, step by step."""
    columns = ("uid", "repeat", "step", "group", "weight_version", "advantage", "mark")
    return [
        ({name: batch[name].to_pylist() for name in columns if name in batch}, loss, lr)
        for batch, loss, _, lr in world.train.steps
    ]


async def killed(make: Make, after: int, later: int = 1) -> tuple[World, Kill]:
    world, kill = make(), Kill(after, later)
    world.algorithm.job.hooks = (kill,)
    with pytest.raises(EndError):
        await world.run()
    assert kill.taken is not None
    return world, kill


async def gone_on(make: Make, kill: Kill) -> World:
    world = make()
    assert kill.taken is not None
    at, state, world.sync.version = kill.taken
    world.algorithm.restore(at, state)
    await world.run()
    return world


@pytest.mark.parametrize("case", CASES)
async def test_a_run_that_goes_on_does_what_one_in_one_go_does(case: str) -> None:
    whole = await CASES[case]().run()
    expected, steps = trained(whole), len(whole.train.steps)
    for after in range(1, steps):
        first, kill = await killed(CASES[case], after)
        second = await gone_on(CASES[case], kill)
        assert trained(first)[:after] + trained(second) == expected, f"behind step {after}"
        logged = first.telemetry.steps[:after] + second.telemetry.steps
        assert logged == whole.telemetry.steps, f"behind step {after}"


async def test_a_warm_start_ends_as_it_would_have_and_only_once() -> None:
    make = CASES["grpo behind a warm start"]
    ends = []
    for after in range(1, 6):
        _, kill = await killed(make, after)
        ends.append((await gone_on(make, kill)).calls.count("reset_optimizer"))
    assert ends == [1, 1, 1, 0, 0], "after its last step too, for that comes before its end"


async def test_the_average_of_weights_is_begun_once() -> None:
    make = CASES["gkd, taught by its average"]
    _, kill = await killed(make, 4)
    calls = (await gone_on(make, kill)).calls
    steps = [call.split(" ")[0] for call in calls if call.startswith(("step", "average"))]
    assert steps == ["step", "average"] * (STEPS - 4), "no more often than steps are taken"
    assert "head of average" in calls, "a new trainer has to be told"


OVERLAP = replace(TWICE, num_iterations=1, max_staleness=1)


@pytest.mark.parametrize("after", range(1, STEPS))
async def test_generations_made_ahead_are_taken_and_one_in_progress_is_made_again(after: int) -> None:
    make = grpo(OVERLAP)
    whole = await make().run()
    first, kill = await killed(make, after)
    assert kill.taken is not None
    _, state, version = kill.taken
    made = len(state.values["made"])
    assert made == 1
    assert [rows for rows in state.rows if rows.startswith("made")] == [f"made-{n}" for n in range(made)]
    second = await gone_on(make, kill)
    uids = [uid for uid, *_ in map(uids_of, trained(first)[:after] + trained(second))]
    assert uids == [uid for uid, *_ in map(uids_of, trained(whole))]
    assert second.calls[0] == (f"sync {version + 1}" if not state.rows.get("samples") else "step")
    drawn = [each.step for each in second.rollout.sampling]
    assert drawn == list(range(-(-after // 2) + made, -(-STEPS // 2))), "seeds go on behind those of what waits"


async def test_a_generation_in_progress_is_forgotten_with_the_prompts_it_took() -> None:
    class Slow(Rollout):
        async def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
            drawn = await super().generate(prompts, sampling)
            for _ in range(200 if sampling.step == 1 else 0):
                await asyncio.sleep(0)
            return drawn

    def make() -> World:
        world = grpo(OVERLAP)()
        world.rollout = world.algorithm.rollout = Slow(world.calls, world.sync)
        return world

    first, kill = await killed(make, 1, later=0)
    assert [each.step for each in first.rollout.sampling] == [0, 1]
    assert kill.taken is not None
    assert kill.taken[1].values["made"] == []
    second = await gone_on(make, kill)
    assert [each.step for each in second.rollout.sampling] == [1, 2, 3, 4]
    assert second.rollout.prompts[0]["uid"].to_pylist() == first.rollout.prompts[1]["uid"].to_pylist()


def uids_of(step: Any) -> tuple[list[str], list[int]]:
    return step[0]["uid"], step[0]["repeat"]


async def test_distillation_ahead_asks_again_for_hidden_states() -> None:
    config = replace(DISTIL, lmbda=1.0, gkd_logits_topk=None, max_staleness=1)
    make = gkd(config, teachers=["teacher"])
    whole = await make().run()
    first, kill = await killed(make, 4)
    assert kill.taken is not None
    (waiting,) = kill.taken[1].rows.values()
    assert "response_ids" in waiting
    assert not [name for name in waiting.column_names if name.startswith("teacher")]
    second = await gone_on(make, kill)
    assert [step[0]["uid"] for step in trained(first)[:4] + trained(second)] == [
        step[0]["uid"] for step in trained(whole)
    ]
    assert all("teacher_hidden" in batch for batch, *_ in second.train.steps)
    assert [each.step for each in second.rollout.sampling] == [6, 7, 8, 9], "that of step 5 was there"


def test_a_class_that_overrides_the_loop_alone_has_no_checkpoints() -> None:
    class Loop(GRPO):
        async def run(self) -> None:
            return None

    class Stepping(GRPO):
        async def step(self, batch: Batch) -> dict[str, float]:
            return {}

    assert (GRPO.can_save, Stepping.can_save, Loop.can_save) == (True, True, False)
