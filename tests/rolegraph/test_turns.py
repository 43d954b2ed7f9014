"""Turns on shared devices: the state machine by itself, then the one that waits and moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rolegraph.errors import TurnError
from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, SamplerRole, TeacherRole, TrainRole
from rolegraph.placement import PlacementConfig
from rolegraph.tenants import Rest, Tenant, tenant
from rolegraph.turns import (
    PHASES,
    At,
    Move,
    Parts,
    Phase,
    Ticket,
    Turns,
    TurnTaker,
    scoring,
    turns_of,
)

SHARED = [("train", "rollout", "orm")]
TRAIN = Tenant({"model": Rest.HOST, "optimizer": Rest.HOST})
ENGINE = {
    level: Tenant({"weights": rest, "kv_cache": Rest.EMPTY}, is_whole=True)
    for level, rest in ((1, Rest.HOST), (2, Rest.LOST))
}
STAYS = Tenant({"model": Rest.STAYS, "optimizer": Rest.STAYS})


def machine(level: int = 1, train: Tenant = TRAIN) -> Turns:
    return Turns(SHARED, {"train": train, "rollout": ENGINE[level]})


def go(turns: Turns, name: str, *, succeeded: bool = True) -> list[str]:
    """Have one phase from beginning to end; what moved for it."""
    ticket = turns.ask(name, PHASES[name])
    turns.begin(ticket)
    try:
        moves = turns.moves(ticket)
        for move in moves:
            turns.moved(move)
        turns.settle(ticket)
    except TurnError:
        turns.leave(ticket, succeeded=False)
        raise
    turns.leave(ticket, succeeded=succeeded)
    return [f"{move.role} {move.to} {' '.join(move.parts)}" for move in moves]


def begun(turns: Turns, name: str) -> Ticket:
    ticket = turns.ask(name, PHASES[name])
    turns.begin(ticket)
    turns.settle(ticket)
    return ticket


# ----- what moves -----


@pytest.mark.parametrize("level", [1, 2])
def test_each_phase_of_a_step_wakes_what_it_needs_and_nothing_else(level: int) -> None:
    turns = machine(level)
    for role in ("train", "rollout"):
        for move in turns.first_rest(role):
            turns.moved(move)
    for first in (["train back model"], ["train away optimizer"]):
        assert go(turns, "sync") == [*first, "rollout back weights"]
        assert go(turns, "generate") == ["train away model", "rollout back kv_cache"]
        assert go(turns, "score") == []
        assert go(turns, "logprobs") == ["rollout away weights kv_cache", "train back model"]
        assert go(turns, "ref_logprobs") == []
        assert go(turns, "train") == ["train back optimizer"]
        assert go(turns, "train") == []


def test_a_sync_after_a_generation_lets_the_cache_go_before_the_trainer_comes_back() -> None:
    turns = machine(level=2)
    go(turns, "train")
    go(turns, "sync")
    go(turns, "generate")
    assert go(turns, "sync") == ["rollout away weights kv_cache", "train back model", "rollout back weights"]
    assert go(turns, "generate") == ["train away model", "rollout back kv_cache"]


def test_what_stays_makes_no_room_and_others_still_make_room_for_it() -> None:
    turns = machine(train=STAYS)
    assert go(turns, "train") == ["rollout away weights kv_cache"], "for gradients and activations"
    assert go(turns, "sync") == ["rollout back weights"]
    assert go(turns, "generate") == ["rollout back kv_cache"]
    assert go(turns, "sync") == [], "nothing has to wake"
    half = machine(train=Tenant({"model": Rest.STAYS, "optimizer": Rest.HOST}))
    assert go(half, "generate") == ["train away optimizer"]
    assert go(half, "logprobs") == ["rollout away weights kv_cache"]
    assert go(half, "train") == ["train back optimizer"]


def test_roles_on_devices_of_their_own_never_move() -> None:
    tenants = {"train": TRAIN, "rollout": ENGINE[2]}
    for groups in ([("train",), ("rollout",)], [("train", "orm"), ("rollout",)], []):
        turns = Turns(groups, tenants)
        assert turns.first_rest("rollout") == []
        assert [go(turns, name) for name in ("generate", "train", "generate", "sync", "generate")] == [[]] * 5


def test_a_teacher_is_one_more_tenant() -> None:
    turns = Turns(
        [("train", "rollout", "teacher")],
        {"train": TRAIN, "rollout": ENGINE[1], "teacher": Tenant({"model": Rest.HOST})},
    )
    assert go(turns, "teacher") == ["train away model optimizer", "rollout away weights kv_cache"]
    assert go(turns, "train") == ["teacher away model", "train back model optimizer"]
    assert go(turns, "teacher") == ["train away model optimizer", "teacher back model"]


def test_a_teacher_has_room_made_for_it_and_a_verifier_needs_none() -> None:
    kinds = {"train": TrainRole, "rollout": RolloutRole, "teacher": TeacherRole}
    placement = PlacementConfig(offload_optimizer=True, sleep_level=1)
    turns = turns_of([(*kinds, "orm")], kinds, placement)
    assert go(turns, "score") == []
    assert go(turns, "teacher") == ["train away optimizer", "rollout away weights kv_cache"]
    assert go(turns, "train") == ["train back optimizer"]
    assert turns.first_rest("teacher") == turns.first_rest("orm") == []
    beside = turns_of([("train", "orm"), ("rollout",)], kinds, placement)
    assert go(beside, "generate") == go(beside, "train") == [], "nobody computes beside them"


def test_reward_models_and_samplers_make_room_as_teachers_and_rollouts_do() -> None:
    kinds = {"sampler": SamplerRole, "prm": PRMRole, "orm_judge": ORMRole}
    turns = turns_of([tuple(kinds)], kinds, PlacementConfig(sleep_level=1, offload_reward_model=True))
    for role in kinds:
        for move in turns.first_rest(role):
            turns.moved(move)
    (judge,) = scoring("orm_judge").values()
    assert go(turns, "sample") == ["sampler back weights kv_cache"]
    assert go(turns, "score_prm") == ["sampler away weights kv_cache", "prm back model"]
    ticket = turns.ask("score_orm_judge", judge)
    turns.begin(ticket)
    assert [(move.role, move.to) for move in turns.moves(ticket)] == [("prm", "away"), ("orm_judge", "back")]
    stays = tenant(PRMRole, PlacementConfig(offload_teacher_model=True))
    assert stays == Tenant({"model": Rest.STAYS}), "a key of its own says whether"


# ----- weights that are gone -----


def test_dropped_weights_are_synced_before_the_next_generation_or_it_is_an_error() -> None:
    turns = machine(level=2)
    go(turns, "train")
    assert turns.at("rollout", "weights") is At.DROPPED
    with pytest.raises(
        TurnError, match=r"generate needs the weights of rollout.*dropped.*sync before it.*sleep_level=1"
    ):
        go(turns, "generate")
    go(turns, "sync")
    assert turns.at("rollout", "weights") is At.DEVICE
    go(turns, "generate")


def test_memory_that_is_mapped_again_holds_no_weights() -> None:
    turns = machine(level=2)
    go(turns, "train")
    go(turns, "sync", succeeded=False)
    assert turns.at("rollout", "weights") is At.HOLLOW
    with pytest.raises(TurnError, match="dropped"):
        go(turns, "generate")
    go(turns, "train")
    assert turns.at("rollout", "weights") is At.DROPPED
    go(turns, "sync")
    go(turns, "generate")


def test_kept_weights_need_no_sync() -> None:
    turns = machine(level=1)
    go(turns, "train")
    assert go(turns, "generate")[-1] == "rollout back weights kv_cache"


# ----- whose turn -----


def test_phases_of_one_group_exclude_each_other_in_the_order_they_asked() -> None:
    turns = machine()
    first = begun(turns, "generate")
    second, third = (turns.ask(name, PHASES[name]) for name in ("train", "score"))
    assert not turns.may_begin(second)
    with pytest.raises(TurnError, match="train cannot begin: generate comes first"):
        turns.begin(second)
    turns.leave(first, succeeded=True)
    assert turns.may_begin(second)
    assert not turns.may_begin(third), "it asked later"
    turns.leave(second, succeeded=False)  # given up while it waited
    assert turns.may_begin(third)


def test_groups_on_devices_of_their_own_do_not_exclude_each_other() -> None:
    turns = Turns([("train", "teacher"), ("rollout", "orm")], {})
    begun(turns, "generate")
    assert turns.may_begin(turns.ask("train", PHASES["train"]))
    assert not turns.may_begin(turns.ask("sync", PHASES["sync"])), "it takes both"
    apart = Turns([("train",), ("rollout",)], {})
    begun(apart, "generate")
    assert apart.may_begin(apart.ask("sync", PHASES["sync"]))


def test_a_phase_is_joined_by_its_like_once_all_is_awake_and_while_nobody_waits() -> None:
    turns = machine()
    first = turns.ask("generate", PHASES["generate"])
    turns.begin(first)
    second = turns.ask("generate", PHASES["generate"])
    assert not turns.may_begin(second), "its parts are still moving"
    turns.settle(first)
    assert turns.may_begin(second)
    turns.begin(second)
    turns.settle(second)
    waiting = turns.ask("train", PHASES["train"])
    late = turns.ask("generate", PHASES["generate"])
    assert not turns.may_begin(late)
    turns.leave(first, succeeded=True)
    assert not turns.may_begin(waiting)
    turns.leave(second, succeeded=True)
    assert turns.may_begin(waiting)


# ----- waiting and moving -----


class Moves:
    """A mover that writes down its calls."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls = role, calls
        self.fault: Exception | None = None

    async def away(self, parts: Parts) -> None:
        await self.call("away", parts)

    async def back(self, parts: Parts) -> None:
        await self.call("back", parts)

    async def call(self, to: str, parts: Parts) -> None:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.calls.append(f"{self.role} {to} {' '.join(parts)}")


def taker(level: int = 1) -> tuple[TurnTaker, list[str], dict[str, Moves]]:
    calls: list[str] = []
    movers = {role: Moves(role, calls) for role in ("train", "rollout")}
    return TurnTaker(machine(level), movers), calls, movers


async def test_moves_come_before_the_block_and_are_told_about() -> None:
    turns, calls, _ = taker()

    @contextmanager
    def moving(roles: tuple[str, ...]) -> Iterator[None]:
        calls.append(f"moving {' '.join(roles)}")
        yield
        calls.append("moved")

    async with turns.take("train", PHASES["train"], moving):
        calls.append("train")
    async with turns.take("train", PHASES["train"], moving):
        calls.append("train again")
    assert calls == ["moving rollout", "rollout away weights kv_cache", "moved", "train", "train again"]


async def test_tasks_of_one_group_wait_for_each_other_and_others_do_not() -> None:
    turns = TurnTaker(Turns([("train", "orm"), ("rollout", "teacher")]))
    calls: list[str] = []
    gate = asyncio.Event()

    async def phase(name: str) -> None:
        async with turns.take(name, PHASES[name]):
            calls.append(f"{name} begins")
            if name == "train":
                await gate.wait()
            calls.append(f"{name} ends")

    tasks = [asyncio.create_task(phase(name)) for name in ("train", "score", "generate", "sync")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == ["train begins", "generate begins", "generate ends"]
    gate.set()
    await asyncio.gather(*tasks)
    assert calls[3:] == ["train ends", "score begins", "score ends", "sync begins", "sync ends"]


async def test_who_gives_up_leaves_the_line() -> None:
    turns, calls, _ = taker()

    async def phase(name: str) -> None:
        async with turns.take(name, PHASES[name]):
            calls.append(name)

    async with turns.take("train", PHASES["train"]):
        waiting = asyncio.create_task(phase("generate"))
        after = asyncio.create_task(phase("score"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await after
    assert calls[-1] == "score"
    assert turns.turns.may_begin(turns.turns.ask("train", PHASES["train"]))


async def test_a_failing_block_or_move_gives_the_turn_back() -> None:
    turns, calls, movers = taker()
    with pytest.raises(ZeroDivisionError):
        async with turns.take("train", PHASES["train"]):
            raise ZeroDivisionError
    movers["train"].fault = RuntimeError("no pinned memory")
    with pytest.raises(RuntimeError, match="no pinned memory"):
        async with turns.take("generate", PHASES["generate"]):
            raise AssertionError("nothing was awake")
    movers["train"].fault = None
    async with turns.take("generate", PHASES["generate"]):
        assert calls[-2:] == ["train away model optimizer", "rollout back weights kv_cache"], "tried again"


async def test_a_sync_that_fails_does_not_make_the_weights_whole() -> None:
    turns, _, _ = taker(level=2)
    async with turns.take("train", PHASES["train"]):
        pass
    with pytest.raises(ZeroDivisionError):
        async with turns.take("sync", PHASES["sync"]):
            raise ZeroDivisionError
    with pytest.raises(TurnError, match="dropped"):
        async with turns.take("generate", PHASES["generate"]):
            pass
    async with turns.take("sync", PHASES["sync"]):
        pass
    async with turns.take("generate", PHASES["generate"]):
        pass


async def test_a_task_does_not_wait_for_itself() -> None:
    turns, _, _ = taker()
    async with turns.take("generate", PHASES["generate"]):
        with pytest.raises(TurnError, match="phase score inside phase generate would wait for itself"):
            async with turns.take("score", PHASES["score"]):
                pass
    async with turns.take("score", PHASES["score"]):
        pass
    apart = TurnTaker(Turns([("train", "teacher"), ("rollout", "orm")]))
    async with apart.take("generate", PHASES["generate"]), apart.take("train", PHASES["train"]):
        pass


async def test_a_role_that_has_started_makes_room_at_once() -> None:
    calls: list[str] = []
    turns = TurnTaker(machine(level=2))
    await turns.started("train", Moves("train", calls))
    await turns.started("rollout", Moves("rollout", calls))
    assert calls == ["train away model optimizer", "rollout away weights kv_cache"]
    async with turns.take("sync", PHASES["sync"]):
        assert calls[2:] == ["train back model", "rollout back weights"]


def test_phases_of_ones_own() -> None:
    judge = Phase({"judge": ("weights",)})
    assert judge.roles == ("judge",)
    assert replace(judge, fills={"rollout": ("weights",)}).roles == ("judge", "rollout")
    turns = Turns([("judge", "train")], {"judge": ENGINE[1], "train": TRAIN})
    ticket = turns.ask("judge", judge)
    turns.begin(ticket)
    assert turns.moves(ticket) == [Move("train", "away", ("model", "optimizer"))]


def test_a_teacher_steps_aside_where_the_config_says_so() -> None:
    for moves, rest in ((True, Rest.HOST), (False, Rest.STAYS)):
        found = tenant(TeacherRole, PlacementConfig(offload_teacher_model=moves))
        assert found == Tenant({"model": rest})


# ----- roles that are started again -----


async def test_another_phase_in_the_middle_of_a_turn_gives_back_what_it_took() -> None:
    turns, calls, _ = taker(level=2)
    async with turns.take("sync", PHASES["sync"]):
        pass
    async with turns.take("generate", PHASES["generate"]):
        calls.clear()
        async with turns.interlude("sync", PHASES["sync"]):
            assert calls == ["rollout away weights kv_cache", "train back model", "rollout back weights"]
        assert calls[3:] == ["train away model", "rollout back kv_cache"]
        assert turns.turns.at("rollout", "weights") is At.DEVICE
    with pytest.raises(ZeroDivisionError):
        async with turns.take("generate", PHASES["generate"]), turns.interlude("sync", PHASES["sync"]):
            raise ZeroDivisionError
    with pytest.raises(TurnError, match="dropped"):
        async with turns.take("generate", PHASES["generate"]):
            pass


async def test_all_others_make_room_for_a_role_that_is_started_anew() -> None:
    turns, calls, _ = taker(level=1)
    async with turns.take("generate", PHASES["generate"]):
        pass
    assert turns.turns.at("train", "optimizer") is At.AWAY
    calls.clear()
    await turns.make_room("train")
    assert calls == ["rollout away weights kv_cache"]
    await turns.make_room("train")
    assert len(calls) == 1, "what is away stays away"
    turns.turns.started_anew("train")
    async with turns.take("train", PHASES["train"]):
        assert len(calls) == 1
    async with turns.take("generate", PHASES["generate"]):
        assert calls[1:] == ["train away model optimizer", "rollout back weights kv_cache"]
    await turns.make_room("stranger")
    turns.turns.started_anew("stranger")
