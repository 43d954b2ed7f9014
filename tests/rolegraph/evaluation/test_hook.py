"""When a run is evaluated, by what, and that it trains as one that is not: over roles in memory."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rolegraph.algorithms.config import GKDConfig, GRPOConfig, SFTConfig, WarmStartConfig
from rolegraph.algorithms.gkd import GKD
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.hooks import Step
from rolegraph.algorithms.scorers import Scorers
from rolegraph.algorithms.sft import SFT
from rolegraph.batch import Batch
from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.checkpoints.hook import Checkpointer
from rolegraph.evaluation.config import EvalSetConfig
from rolegraph.evaluation.evaluator import EvalSet, Evaluator, seed_of
from rolegraph.evaluation.hook import EvalHook
from rolegraph.interfaces import ORMRole
from rolegraph.placement import PlacementConfig
from tests.rolegraph.algorithms.fakes import Dataset, World

TWO_BY_TWO = GRPOConfig(global_batch_size=4, num_generations=2, scale_rewards="none", max_completion_length=9)
REWARDS = [[1.0, 0.0, 5.0, 3.0]]


@dataclass
class Verifier:
    """Rewards of a set: 1 where the row's number is even."""

    scored: list[Batch] = field(default_factory=list)

    async def score(self, batch: Batch) -> Batch:
        self.scored.append(batch)
        even = np.arange(len(batch)) % 2 == 0
        return batch.with_columns({"reward": even.astype(float), "rewards/even": even.astype(float)})


class Files:
    """Keeps what is to be written."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, Batch]] = []

    def save(self, batch: Batch, name: str) -> None:
        self.saved.append((name, batch))

    def faults(self, wait_s: float = 0.0) -> list[str]:
        return [f"disk full after {wait_s:g} s"] if wait_s else []


class Evaluated:
    """A hook over sets in memory, and what it had to do with."""

    def __init__(
        self,
        config: EvalSetConfig | None = None,
        every: int | None = 2,
        scorer: Any = None,
    ) -> None:
        self.verifier, self.files = Verifier(), Files()
        rows = Dataset(4, responses=True).rows
        scorer = self.verifier if scorer is None else scorer
        sets = [EvalSet("held_out", config or EvalSetConfig(), rows, cast(ORMRole, scorer), completion_length=7)]
        evaluator = Evaluator(sets, Path("unused"))
        evaluator._files = cast(Any, self.files)
        self.hook = EvalHook(evaluator, every)


async def grpo(hooks: Sequence[EvalHook] = (), max_steps: int = 3, **options: Any) -> World:
    config = replace(TWO_BY_TWO, **options)
    return await World(GRPO, config, rewards=REWARDS, max_steps=max_steps, hooks=hooks).run()


async def test_before_the_first_step_every_so_many_and_once_at_the_end() -> None:
    for steps, expected in ((3, [2, 3]), (4, [2, 4])):
        world = await grpo([Evaluated(every=2).hook], max_steps=steps)
        assert [step for step, _ in world.telemetry.evaluations] == [0]
        evaluated = [step for step, metrics in world.telemetry.steps if "eval/held_out/pass@1" in metrics]
        assert evaluated == expected


async def test_the_weights_of_now_are_evaluated_without_a_new_version() -> None:
    evaluated = Evaluated(every=2)
    world = await grpo([evaluated.hook], max_steps=2)
    evaluation = ["generate"]
    step = ["generate", "score", "step"]
    assert world.calls == [
        "refresh at 0", *evaluation, "log evaluation at 0",
        "sync 1", *step, "log 1",
        "sync 2", *step, "refresh at 2", *evaluation, "log 2",
    ]  # fmt: skip
    assert world.telemetry.phases.count("evaluation") == 2, "whose time is none of training"
    assert world.telemetry.phases.count("eval") == 2 * 3, "transfer, answers and scores are all its own time"
    assert world.telemetry.phases.count("generate") == 2, "training's"


@pytest.mark.parametrize("config", [EvalSetConfig(), EvalSetConfig(n=4, temperature=1.0, seed=3)])
@pytest.mark.parametrize("overlap", [0, 1])
async def test_a_run_that_is_evaluated_trains_as_one_that_is_not(config: EvalSetConfig, overlap: int) -> None:
    plain = await grpo(max_steps=4, max_staleness=overlap)
    evaluated = Evaluated(config, every=1)
    with_evaluation = await grpo([evaluated.hook], max_steps=4, max_staleness=overlap)

    def trained(world: World) -> list[Any]:
        columns = ("uid", "repeat", "step", "group", "advantage", "weight_version", "reward")
        return [[batch[name].to_pylist() for name in columns] for batch, *_ in world.train.steps]

    def figures(world: World) -> list[Any]:
        return [
            (step, {name: value for name, value in metrics.items() if not name.startswith("eval/")})
            for step, metrics in world.telemetry.steps
        ]

    def draws(world: World) -> list[Any]:
        return [sampling for sampling in world.rollout.sampling if sampling.seed == 3]

    assert trained(plain) == trained(with_evaluation)
    assert figures(plain) == figures(with_evaluation)
    assert draws(plain) == draws(with_evaluation) == plain.rollout.sampling
    assert plain.sync.version == with_evaluation.sync.version
    assert len(with_evaluation.rollout.sampling) == len(plain.rollout.sampling) + 5


async def test_every_evaluation_draws_by_the_same_seeds_which_training_has_none_of() -> None:
    config = EvalSetConfig(n=2, temperature=0.7, top_p=0.9, top_k=5, seed=3)
    world = await grpo([Evaluated(config, every=1).hook])
    own = [each for each in world.rollout.sampling if each.seed == seed_of(3)]
    assert len(own) == 4
    assert len(set(own)) == 1
    assert (own[0].n, own[0].temperature, own[0].top_p, own[0].top_k, own[0].max_tokens) == (2, 0.7, 0.9, 5, 7)
    assert {each.seed for each in world.rollout.sampling} == {3, seed_of(3)}
    assert seed_of(3) != 3


async def test_metrics_and_answers() -> None:
    evaluated = Evaluated(EvalSetConfig(n=2, temperature=1.0, metrics=("pass@1", "pass@2", "mean@1")), every=9)
    world = await grpo([evaluated.hook], max_steps=1)
    metrics = world.telemetry.steps[0][1]
    expected = {"pass@1": 0.5, "pass@2": 1.0, "mean@1": 1.0, "reward/mean": 0.5, "reward/null": 0.0}
    expected |= {"rewards/even/mean": 0.5, "response_length/mean": 4.0, "response_length/truncated": 0.0}
    assert {name: metrics[f"eval/held_out/{name}"] for name in expected} == expected
    names = [name for name, _ in evaluated.files.saved]
    assert names == ["held_out/step-0.parquet", "held_out/step-1.parquet"]
    answers = evaluated.files.saved[-1][1]
    assert answers["uid"].to_pylist() == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    assert answers["passed"].to_pylist() == [True, False] * 4
    asked = evaluated.verifier.scored[0]
    assert "answer" in asked, "columns of the set's rows reach its functions"


async def test_the_runs_own_scorers_score_sets_without_functions() -> None:
    scored: list[str] = []

    class Judge(Verifier):
        async def score(self, batch: Batch) -> Batch:
            scored.append("judge")
            return await super().score(batch)

    world = await grpo([Evaluated(scorer=Scorers({"orm": cast(ORMRole, Judge())})).hook], max_steps=1)
    assert scored == ["judge", "judge"]
    assert world.telemetry.steps[0][1]["eval/held_out/pass@1"] == 0.5


async def test_a_warm_start_is_no_part_of_it() -> None:
    evaluated = Evaluated(every=1)
    world = await grpo([evaluated.hook], max_steps=1, warm_start=WarmStartConfig(max_steps=2))
    assert [step for step, _ in world.telemetry.evaluations] == [2], "numbered as the step before it"
    assert [name for name, _ in evaluated.files.saved] == ["held_out/step-2.parquet", "held_out/step-3.parquet"]
    calls = [call for call in world.calls if call.startswith(("log", "refresh"))]
    assert calls == ["log 1", "log 2", "refresh at 0", "log evaluation at 2", "refresh at 1", "log 1"]


async def test_the_loss_of_a_set_needs_no_engine() -> None:
    evaluated = Evaluated(EvalSetConfig(loss=True), every=1)
    world = World(SFT, SFTConfig(global_batch_size=2), max_steps=1, hooks=[evaluated.hook])

    async def logprobs(batch: Batch, **options: Any) -> Batch:
        assert not options, "at temperature 1, by the weights of now"
        return Batch.from_columns({"logprobs": [[-0.5], [-1.5], [-1.0], [-2.0]]})

    world.train.logprobs = logprobs  # type: ignore[method-assign, assignment]
    await world.run()
    assert world.calls == ["log evaluation at 0", "step", "log 1"]
    assert world.telemetry.evaluations[0][1] == {"eval/held_out/loss": 1.25}
    assert evaluated.files.saved == []


async def test_supervised_training_with_engines_that_only_evaluate() -> None:
    world = await World(SFT, SFTConfig(global_batch_size=2), max_steps=1, hooks=[Evaluated().hook]).run()
    evaluation = ["refresh at 0", "generate"]
    assert world.calls == [*evaluation, "log evaluation at 0", "step", *evaluation, "log 1"]
    assert "response_ids" not in world.rollout.prompts[0], "the dataset's own"


async def test_turns_are_taken_on_shared_devices() -> None:
    placement = PlacementConfig(colocate_groups=[["train", "rollout"]], offload_optimizer=True, sleep_level=2)
    config = GKDConfig(global_batch_size=2, lmbda=1.0, gkd_logits_topk=2)
    hooks, rewards = [Evaluated().hook], [[0.0, 0.0]]
    world = World(
        GKD, config, max_steps=1, hooks=hooks, placement=placement, teachers=["teacher"], rows=4, rewards=rewards
    )
    await world.run()
    started, evaluated = ["offload optimizer", "sleep 2"], ["wake weights", "refresh at 0", "wake kv_cache", "generate"]
    assert world.calls[:7] == [*started, *evaluated, "log evaluation at 0"], "weights that deep sleep dropped are back"
    assert world.calls[-6:] == ["offload optimizer", evaluated[0], "refresh at 1", *evaluated[2:], "log 1"]


async def test_a_part_that_goes_on_evaluates_nothing_twice_and_shows_all() -> None:
    evaluated = Evaluated(every=2)
    world = World(GRPO, TWO_BY_TWO, rewards=REWARDS, max_steps=2, hooks=[evaluated.hook])
    world.telemetry.earlier = {0: {"eval/held_out/pass@1": 0.1}}
    await world.run()
    assert world.telemetry.evaluations == []
    await evaluated.hook.ended(world.algorithm)
    header, rows = world.telemetry.shown[0]
    assert header == ["evaluation", "step 0", "step 2"]
    assert rows[0] == ["held_out/pass@1", 0.1, 0.5]
    assert world.telemetry.events[-1] == "answers were not saved: disk full after 10 s"


async def test_a_set_without_any_reward_has_no_number() -> None:
    class Nothing:
        async def score(self, batch: Batch) -> Batch:
            return batch.with_columns({"reward": np.full(len(batch), np.nan)})

    world = await grpo([Evaluated(scorer=Nothing()).hook], max_steps=1)
    assert math.isnan(world.telemetry.steps[0][1]["eval/held_out/pass@1"])
    assert world.telemetry.steps[0][1]["eval/held_out/reward/null"] == 4.0


async def test_what_is_due_when_a_signal_comes_is_left_to_the_run_that_goes_on() -> None:
    whole = Evaluated(every=2)
    wanted = dict((await grpo([whole.hook], max_steps=6)).telemetry.steps)[2]
    first, second = Evaluated(every=2), Evaluated(every=2)
    world = World(GRPO, TWO_BY_TWO, rewards=REWARDS, max_steps=6, hooks=[first.hook])
    assert first.hook.state() == {}
    first.hook._stop.signal = signal.SIGTERM
    assert await first.hook.stepped(world.algorithm, Step("grpo", 1, 6)) == {}
    assert first.hook.state() == {}, "none is due"
    assert await first.hook.stepped(world.algorithm, Step("grpo", 2, 6)) == {}
    assert world.calls == [], "the run saves at once"
    second.hook.restore(json.loads(json.dumps(first.hook.state())))
    checkpointer = Checkpointer(CheckpointConfig(every=1), Path("unused"), {}, use_ray=False)
    algorithm = world.algorithm
    await second.hook.begun(algorithm, Step("grpo", 2, 6))
    assert {name: wanted[name] for name in world.telemetry.late} == world.telemetry.late
    assert [name for name, _ in second.files.saved] == ["held_out/step-2.parquet"]
    assert world.calls[-1] == "log evaluation late"
    checkpointer._learn(algorithm.at, 2)
    assert checkpointer.metrics == world.telemetry.late, "keep_best knows them"
    assert second.hook.state() == {}
    await second.hook.begun(algorithm, Step("grpo", 2, 6))
    assert world.calls.count("log evaluation late") == 1


async def test_the_last_step_is_evaluated_whoever_asks_to_stop() -> None:
    evaluated = Evaluated(every=2)
    world = World(GRPO, TWO_BY_TWO, rewards=REWARDS, max_steps=2, hooks=[evaluated.hook])
    evaluated.hook._stop.signal = signal.SIGTERM
    assert await evaluated.hook.stepped(world.algorithm, Step("grpo", 2, 2))
    assert evaluated.hook.state() == {}
