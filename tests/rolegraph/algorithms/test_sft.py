"""The supervised loop over roles in memory."""

from __future__ import annotations

import pytest

from rolegraph.algorithms.config import PTConfig, SFTConfig
from rolegraph.algorithms.sft import PT, SFT
from rolegraph.interfaces import LossSpec, RolloutRole, TrainRole
from tests.rolegraph.algorithms.fakes import World


@pytest.mark.parametrize(("algorithm", "config"), [(SFT, SFTConfig), (PT, PTConfig)])
async def test_steps_over_the_dataset(algorithm: type[SFT], config: type[SFTConfig]) -> None:
    world = await World(algorithm, config(global_batch_size=3), max_steps=3, rows=5).run()
    assert world.calls == ["step", "log 1", "step", "log 2", "step", "log 3"]
    assert world.trained("uid") == [["p0", "p1", "p2"], ["p3", "p4", "p0"], ["p1", "p2", "p3"]]
    assert world.telemetry.stages == [(algorithm.stage, 3)]
    assert world.dataset.asked == [(3, 3)]
    batch, loss, temperature, lr = world.train.steps[0]
    assert {"prompt_ids", "response_ids", "length"} <= set(batch.column_names)
    assert (loss, temperature, lr) == (LossSpec("rolegraph.losses.supervised.cross_entropy"), 1.0, None)
    assert world.telemetry.steps[0][1] == {"loss": 0.5, "tokens": 3.0, "seconds/optimizer_step": 1.25}


async def test_without_max_steps_it_is_one_pass() -> None:
    world = await World(SFT, SFTConfig(global_batch_size=3), max_steps=None, rows=7).run()
    assert len(world.train.steps) == 3


async def test_a_loss_of_its_own() -> None:
    loss = LossSpec("my.loss", {"smoothing": 0.1})
    world = await World(SFT, SFTConfig(global_batch_size=2, loss=loss)).run()
    assert world.train.steps[0][1] is loss


def test_roles() -> None:
    evaluated_by = {"rollout": (RolloutRole, True)}
    assert SFT.roles() == PT.roles() == {"train": (TrainRole, False), **evaluated_by}
