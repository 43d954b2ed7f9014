"""How engines that were started again come by the weights of now, over the real wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.care import RunCare
from rolegraph.errors import TurnError
from rolegraph.interfaces import RolloutRole, SamplingParams, TensorInfo, TransferGroup
from rolegraph.movers import EngineMover
from rolegraph.role import endpoint
from rolegraph.telemetry import Telemetry, read_metrics
from rolegraph.tenants import Rest, Tenant
from rolegraph.turns import PHASES, Parts, Turns, TurnTaker
from rolegraph.weights import WeightReceiver, WeightSync
from tests.rolegraph.fakes import batch_of
from tests.rolegraph.mortals import Colony, Mortal
from tests.rolegraph.test_weights import FakeTrain, weights


class Engine(RolloutRole):
    """Draws the version of its weights, and dies of the row that its config names."""

    queue_in_flight = 2
    colony: Colony
    member: Mortal

    def setup(self) -> None:
        self.version = 0
        self.weights: dict[str, torch.Tensor] = {}
        self.receiver: WeightReceiver | None = None
        self.is_asleep = False

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        if self.is_asleep:
            raise TurnError("the engine is asleep")
        time.sleep(0.01)
        poison: dict[str, int] = self.colony.config
        for uid in prompts["uid"].to_pylist():
            if poison.get(uid, 0):
                poison[uid] -= 1
                self.member.die()
        return prompts.with_columns({"weight_version": np.full(len(prompts), self.version)})

    def transfer_workers(self) -> tuple[int, int]:
        return self.context.rank, 1

    def connect_weights(self, group: TransferGroup) -> None:
        self.receiver = WeightReceiver(group, group.offsets[self.context.rank])

    def receive_weights(self, manifest: list[TensorInfo], bucket_bytes: int, version: int) -> float:  # type: ignore[override]
        if self.colony.config.pop("receiving", 0):
            self.member.die()
        assert self.receiver is not None
        self.weights = dict(self.receiver.receive(manifest))
        self.version = version
        return 0.0

    def disconnect_weights(self) -> None:
        if self.receiver is not None:
            self.receiver.close()

    def sleep(self, level: int) -> None:
        if self.member in self.colony.made[self.colony.ranks :] and self.colony.config.pop("falling asleep", 0):
            self.member.die()
        self.is_asleep = True

    def wake_up(self, parts: Parts) -> None:
        self.is_asleep = False


class Moves:
    """A mover that takes a moment, writes down its calls, and knows what is away."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls = role, calls
        self.gone: set[str] = set()

    async def away(self, parts: Parts) -> None:
        self.calls.append(f"{self.role} away {' '.join(parts)}")
        await asyncio.sleep(0.01)
        self.gone |= set(parts)

    async def back(self, parts: Parts) -> None:
        self.calls.append(f"{self.role} back {' '.join(parts)}")
        await asyncio.sleep(0.01)
        self.gone -= set(parts)


def cared_for(
    folder: Path, ranks: int = 2, turns: TurnTaker | None = None, train: FakeTrain | None = None
) -> tuple[Colony, FakeTrain, WeightSync]:
    """Engines that are started again, their trainer, and the way between them."""
    colony, train = Colony(Engine, ranks, config={}), train or FakeTrain()
    care = RunCare(3, turns or TurnTaker(), Telemetry(folder))
    care.sync = WeightSync(train, [colony.group.handle], timeout_s=15)  # type: ignore[arg-type]
    care.rollout = colony.group
    colony.rescue(3, join=partial(care.join, "rollout"), in_turn=care.in_turn("rollout"))
    return colony, train, care.sync


def engines(colony: Colony) -> list[Any]:
    return [member.role for member in colony.group.members]  # type: ignore[attr-defined]


async def drawn(colony: Colony, rows: int = 30) -> set[int]:
    out = await colony.group.handle.generate(batch_of(rows), SamplingParams())
    assert out["uid"].to_pylist() == batch_of(rows)["uid"].to_pylist()
    return set(out.numpy("weight_version").tolist())


async def everybody(colony: Colony) -> None:
    async with asyncio.timeout(10):
        while colony.group.is_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_new_engine_draws_with_the_weights_of_now_and_takes_part_in_the_next_sync(tmp_path: Path) -> None:
    colony, train, sync = cared_for(tmp_path)
    await sync.sync()
    train.tensors = weights(seed=9)
    await sync.sync()
    colony.config["u3"] = 1
    assert await drawn(colony) == {2}, "never those of the start"
    await everybody(colony)
    assert [engine.version for engine in engines(colony)] == [2, 2]
    assert all(torch.equal(engine.weights["embed"], train.tensors["embed"]) for engine in engines(colony))
    train.tensors = weights(seed=10)
    await sync.sync()
    assert [engine.version for engine in engines(colony)] == [sync.version, sync.version] == [3, 3]
    assert all(torch.equal(engine.weights["embed"], train.tensors["embed"]) for engine in engines(colony))
    await sync.close()


async def test_before_the_first_sync_a_new_engine_is_as_good_as_the_others(tmp_path: Path) -> None:
    colony, _, _ = cared_for(tmp_path)
    colony.config["u3"] = 1
    assert await drawn(colony) == {0}
    await everybody(colony)


async def test_a_sync_waits_for_nobody_who_is_gone(tmp_path: Path) -> None:
    colony, _, sync = cared_for(tmp_path, ranks=1)
    await sync.sync()
    colony.group.members[0].die()  # type: ignore[attr-defined]
    assert await sync.sync() < 5
    assert sync.version == 2
    assert await drawn(colony) == {2}
    await sync.sync()
    assert await drawn(colony) == {3}
    await sync.close()


async def test_one_that_dies_while_it_receives_is_left_out_and_comes_back(tmp_path: Path) -> None:
    colony, _, sync = cared_for(tmp_path)
    await sync.sync()
    colony.config["receiving"] = 1
    await sync.sync()
    assert sync.version == 2
    assert await drawn(colony) == {2}
    await everybody(colony)
    assert [engine.version for engine in engines(colony)] == [2, 2]
    await sync.close()


class MovedTrain(FakeTrain):
    """Sends only while its model is there."""

    mover: Moves

    async def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> Any:
        if "model" in self.mover.gone:
            await self.disconnect_weights()
            raise TurnError("the trainer's model is offloaded")
        return await super().send_weights(bucket_bytes, adapter=adapter)


@asynccontextmanager
async def sharing(
    folder: Path, ranks: int = 2, other: str = "rollout", *, sleeps: bool = False
) -> AsyncIterator[tuple[Colony, WeightSync, TurnTaker, list[str]]]:
    """Engines, a trainer that moves off the devices that it shares with another role, and the calls of their movers.

    The first sync was made. `sleeps`: engines are moved by calls on them.
    """
    calls: list[str] = []
    tenants = {
        "train": Tenant({"model": Rest.HOST, "optimizer": Rest.HOST}),
        "teacher": Tenant({"model": Rest.HOST}),
        "rollout": Tenant({"weights": Rest.LOST, "kv_cache": Rest.EMPTY}, is_whole=True),
    }
    movers = {role: Moves(role, calls) for role in ("train", other)}
    turns = TurnTaker(Turns([("train", other)], tenants), movers)
    train = MovedTrain()
    train.mover = movers["train"]
    colony, _, sync = cared_for(folder, ranks, turns, train)
    if sleeps:
        await turns.started("rollout", EngineMover(colony.group.handle, 1))
    async with turns.take("sync", PHASES["sync"]):
        await sync.sync()
    yield colony, sync, turns, calls
    await sync.close()


JOINED = (
    "rollout away weights kv_cache", "train back model", "rollout back weights", "train away model",
    "rollout back kv_cache",
)  # fmt: skip
"""The moves around the transfer to an engine that joins."""


async def test_where_roles_move_all_engines_rest_while_the_trainer_is_there(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (colony, sync, turns, calls):
        async with turns.take("generate", PHASES["generate"]):
            calls.clear()
            colony.config["u3"] = 1
            assert await drawn(colony, rows=12) == {1}
            assert colony.group.alive == (0, 1), "a call ends after what was started"
            assert calls == list(JOINED)
            assert [engine.version for engine in engines(colony)] == [1, 1]
        async with turns.take("train", PHASES["train"]):
            assert calls[-2:] == ["rollout away weights kv_cache", "train back model optimizer"]
            colony.group.members[1].die()  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
        async with turns.take("sync", PHASES["sync"]):
            await sync.sync()
            assert colony.restarts == 1, "nobody is started while others have the devices"
        async with turns.take("generate", PHASES["generate"]):
            assert await drawn(colony, rows=4) == {2}
            assert (colony.restarts, colony.group.alive) == (2, (0, 1))


async def test_where_roles_move_engines_that_die_together_join_one_after_another(tmp_path: Path) -> None:
    """As a row that takes down an engine, and then the one that gets it next."""
    async with sharing(tmp_path) as (colony, _, turns, calls), turns.take("generate", PHASES["generate"]):
        calls.clear()
        colony.config["u3"] = 2
        assert await drawn(colony, rows=12) == {1}
        assert (colony.restarts, colony.group.alive) == (2, (0, 1))
        assert calls == [*JOINED, *JOINED]
        assert [engine.version for engine in engines(colony)] == [1, 1]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_where_roles_move_one_that_dies_as_it_joins_is_started_once_more(tmp_path: Path, ranks: int) -> None:
    async with sharing(tmp_path, ranks) as (colony, _, turns, _), turns.take("generate", PHASES["generate"]):
        colony.config |= {"u3": 1, "receiving": 1}
        assert await drawn(colony, rows=12) == {1}
        assert colony.restarts == 2
        assert colony.group.alive == tuple(range(ranks))
        assert all(member.alive for member in colony.group.members)


async def test_where_roles_move_one_that_dies_as_it_falls_asleep_leaves_the_others_awake(tmp_path: Path) -> None:
    """Between its start and its weights it has to rest with the others, while the trainer comes."""
    async with sharing(tmp_path, sleeps=True) as (colony, _, turns, _), turns.take("generate", PHASES["generate"]):
        colony.config |= {"u3": 1, "falling asleep": 1}
        assert await drawn(colony, rows=12) == {1}
        assert "falling asleep" not in colony.config
        assert (colony.restarts, colony.group.alive) == (2, (0, 1))


async def test_a_new_engine_waits_for_a_trainer_that_rests_while_another_role_has_its_devices(tmp_path: Path) -> None:
    async with sharing(tmp_path, other="teacher") as (colony, _, turns, calls):
        async with turns.take("teacher", PHASES["teacher"]):
            colony.config["u3"] = 1
            assert await drawn(colony) == {1}
            assert calls[-2:] == ["train away model optimizer", "teacher back model"]
            await asyncio.sleep(0.3)
            assert colony.group.is_awaited
        await everybody(colony)
        assert await drawn(colony) == {1}
        assert [engine.version for engine in engines(colony)] == [1, 1]


class BusyTrain(FakeTrain):
    """Is in its steps when it is to send, and leaves no group before their end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.is_done = asyncio.Event(), asyncio.Event()
        self.is_done.set()

    async def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> Any:
        if not self.is_done.is_set():
            self.is_asked.set()
            await self.is_done.wait()
        return await super().send_weights(bucket_bytes, adapter=adapter)

    async def disconnect_weights(self) -> Any:
        if self.is_asked.is_set():
            await self.is_done.wait()
        return await super().disconnect_weights()


async def test_a_run_that_ends_does_not_wait_for_the_trainer_that_a_new_engine_waits_for(tmp_path: Path) -> None:
    train = BusyTrain()
    colony, _, sync = cared_for(tmp_path, train=train)
    await sync.sync()
    train.is_done.clear()
    colony.config["u3"] = 1
    assert await drawn(colony) == {1}
    await asyncio.wait_for(train.is_asked.wait(), 10)
    assert colony.group.recovery is not None
    await asyncio.wait_for(colony.group.recovery.close(), 2)
    train.is_done.set()
    await sync.close()


def test_a_run_tells_and_counts(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    care = RunCare(1, TurnTaker(), telemetry)
    care.restarted("orm")
    care.restarted("orm")
    telemetry.stage("grpo", 2)
    telemetry.step(1, {"loss": 1.0})
    telemetry.step(2, {"loss": 1.0})
    telemetry.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("restarts/orm") for row in rows] == [2.0, None]


def test_a_role_waits_for_its_turn_only_where_something_moves() -> None:
    stays = Tenant({"model": Rest.STAYS, "optimizer": Rest.STAYS})
    engine = Tenant({"weights": Rest.HOST, "kv_cache": Rest.EMPTY}, is_whole=True)
    turns = Turns([("train", "rollout", "orm")], {"train": stays, "rollout": engine})
    assert [turns.shares(role) for role in ("train", "rollout", "orm")] == [True, True, False]
    still = Turns([("train", "rollout")], {"train": stays, "rollout": Tenant({"weights": Rest.STAYS})})
    assert not still.shares("rollout")
    apart = Turns([("train",), ("rollout",)], {"train": stays, "rollout": engine})
    assert not apart.shares("rollout")
