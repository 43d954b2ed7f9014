"""The train group when one of its ranks has died, with members that run in this process."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

import rolegraph.health
import rolegraph.rebuild
import rolegraph.run
from rolegraph.algorithms.hooks import Hook
from rolegraph.batch import Batch
from rolegraph.errors import BadStepsError, RoleError
from rolegraph.health import State
from rolegraph.interfaces import RolloutRole, SamplingParams, TrainRole
from rolegraph.rebuild import TrainGroup, end_stragglers
from rolegraph.role import Mesh
from rolegraph.turns import TurnTaker
from tests.rolegraph.fakes import batch_of
from tests.rolegraph.mortals import Colony


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolegraph.health, "BACKOFF_S", 0.02)


class Trainer(TrainRole):
    pass


class Engine(RolloutRole):
    colony: Colony
    stops = False

    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        for _ in range(500):
            if self.stops:
                break
            time.sleep(0.01)
        return prompts

    def abort(self) -> int:
        self.stops = True
        return 1


class World:
    """A trainer of two ranks and an engine, and what is told about them."""

    def __init__(self, max_restarts: int = 2) -> None:
        self.trainer, self.engine = Colony(Trainer, mesh=Mesh(dp=2)), Colony(Engine, ranks=1)
        self.engine.rescue()
        self.groups = {"train": self.trainer.group, "rollout": self.engine.group}
        self.max_restarts = max_restarts
        self.told: list[str] = []
        self.counted: list[str] = []
        self.sync = None
        self.rollout = self.engine.group
        self.fails = 0
        self.train = TrainGroup(self, TurnTaker(), self)  # type: ignore[arg-type]

    def group(self, role: str) -> Any:
        return self.groups[role]

    async def start_again(self, role: str) -> list[Any]:
        assert not any(member.alive for member in self.trainer.group.members)
        if self.fails:
            self.fails -= 1
            raise RoleError("no memory", role="train", rank=0)
        return self.trainer.make(range(2))

    def tell(self, text: str) -> None:
        self.told.append(text)

    def restarted(self, role: str) -> None:
        self.counted.append(role)

    def kill(self, rank: int) -> None:
        self.trainer.group.members[rank].die()  # type: ignore[attr-defined]


class Ending(Hook):
    was_broken_off = False

    async def broken_off(self) -> None:
        self.was_broken_off = True


async def test_a_group_that_is_whole_has_not_died() -> None:
    world = World()
    assert await world.train.has_died() is None
    del world.groups["train"]
    assert await world.train.has_died() is None, "nothing is trained"


async def test_all_ranks_are_started_anew_in_their_places_and_others_end_what_they_did() -> None:
    world, hook = World(), Ending()
    group, old = world.trainer.group, list(world.trainer.group.members)
    drawing = asyncio.ensure_future(world.engine.group.handle.generate(batch_of(2), SamplingParams()))
    await asyncio.sleep(0.05)
    drawing.cancel()
    world.kill(1)
    death = await world.train.has_died()
    assert death is not None
    assert death.rank == 1
    await world.train.end([hook])
    assert hook.was_broken_off
    assert not any(member.alive for member in old), "those that wait for the dead one go, too"
    assert world.train.may_restart(death, "and goes on behind step 4")
    started = time.monotonic()
    await world.train.restart()
    assert time.monotonic() - started < 3, "what is being drawn for nobody is broken off"
    assert not world.engine.group.in_flight
    assert not set(map(id, old)) & set(map(id, group.members))
    assert await world.train.has_died() is None
    assert world.train.health.state is State.HEALTHY
    assert world.counted == ["train"]
    assert world.told[0] == (
        "train rank 1 died: killed before; the train group is started again (restart 1 of 2), and goes on behind step 4"
    )
    assert world.told[1].startswith("train runs again after ")


async def test_a_start_that_fails_is_tried_again_until_restarts_are_used_up() -> None:
    world = World(max_restarts=2)
    world.fails = 1
    world.kill(0)
    death = await world.train.has_died()
    assert death is not None
    await world.train.end([])
    assert world.train.may_restart(death, "and begins anew")
    await world.train.restart()
    assert world.train.health.restarts == 2
    assert "train rank 0 died: no memory; the train group is started again (restart 2 of 2), once more" in world.told
    world.kill(1)
    death = await world.train.has_died()
    assert death is not None
    assert not world.train.may_restart(death, "and begins anew")
    assert world.told[-1] == "train rank 1 died: killed before; and the run ends: health.max_restarts=2 is used up"


async def test_where_no_start_succeeds_its_error_ends_the_run() -> None:
    world = World(max_restarts=1)
    world.fails = 1
    world.kill(0)
    death = await world.train.has_died()
    assert death is not None
    assert world.train.may_restart(death, "and begins anew")
    await world.train.end([])
    with pytest.raises(RoleError, match="no memory"):
        await world.train.restart()


class Apart(TrainRole):
    """Rank 0 fails in a save that the others stay in for a while."""

    member: Any
    colony: Colony
    stays_s = 0.0

    def setup(self) -> None:
        self.busy: dict[str, float] = {}

    def save(self, path: str) -> None:
        if self.context.rank == 0:
            raise MemoryError
        self.busy = {"save": 0.0}
        self.member.metrics = lambda: self.member._run(lambda: {"busy": self.busy})
        time.sleep(type(self).stays_s)
        self.busy = {}


@pytest.mark.parametrize(("stays_s", "ended"), [(1.0, True), (0.1, False)])
async def test_ranks_that_wait_for_one_that_has_failed_are_ended(
    stays_s: float, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolegraph.rebuild, "STRAGGLE_S", 0.5)
    monkeypatch.setattr(rolegraph.rebuild, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(Apart, "stays_s", stays_s)
    colony, told = Colony(Apart, mesh=Mesh(dp=2)), list[str]()
    with pytest.raises(RoleError, match="MemoryError"):
        await colony.group.handle.save("there")
    assert await end_stragglers(colony.group.handle, ["save"], told.append) is ended
    assert [member.alive for member in colony.group.members] == [True, not ended]
    assert told == (["fake: ranks 1 still wait for one that has failed, and are ended"] if ended else [])


@pytest.mark.parametrize("error", [BadStepsError("no finite loss"), OSError(28, "No space left on device")])
async def test_an_error_that_ends_a_run_whose_trainer_lives_lets_hooks_finish(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rolegraph.run, "run_algorithm", fails)
    hook, care = Ending(), SimpleNamespace(max_restarts=1)
    ready: Any = SimpleNamespace(graph=SimpleNamespace(groups={}), turns=TurnTaker(), care=care)
    ready.hooks, ready.config = SimpleNamespace(make=lambda: (hook,)), SimpleNamespace()
    ready.config.checkpoint = SimpleNamespace(every=2)
    with pytest.raises(type(error)):
        await rolegraph.run.run_to_the_end(ready, None)
    assert hook.was_broken_off
