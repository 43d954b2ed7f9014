"""Moving the parts of roles: which endpoints are called, and what is asked again."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from rolegraph.errors import RoleError, TurnError
from rolegraph.group import RoleGroup
from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, SamplerRole, TeacherRole, TrainRole
from rolegraph.member import LocalSent
from rolegraph.movers import mover
from rolegraph.placement import PlacementConfig
from rolegraph.role import Mesh, Role, RoleContext


class FakeMember:
    """Answers all calls, but for one that fails, of which it may die."""

    log_file = None

    def __init__(self, role: str, rank: int, calls: list[Any]) -> None:
        self.context = RoleContext(role=role, rank=rank)
        self.alive = True
        self.calls = calls
        self.fault: str | None = None
        self.dies = False

    def send(self, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalSent:
        self.calls.append((self.context.rank, endpoint.name, *args, *kwargs.values()))
        done: Future[Any] = Future()
        if self.fault is None:
            done.set_result(None)
        else:
            done.set_exception(RuntimeError(self.fault))
            self.fault = None
        return LocalSent(done)

    def explain(self, error: BaseException, endpoint: str) -> RoleError:
        self.alive = not self.dies
        return RoleError(str(error), role=self.context.role, rank=self.context.rank, endpoint=endpoint)


def running(kind: type[Role], name: str) -> tuple[Any, list[FakeMember], list[Any]]:
    """The handle of a role of two ranks, those, and the calls that reach them."""
    calls: list[Any] = []
    members = [FakeMember(name, rank, calls) for rank in range(2)]
    return RoleGroup(kind, members, Mesh(dp=2)).handle, members, calls  # type: ignore[arg-type]


async def test_endpoints_of_each_kind() -> None:
    train, _, calls = running(TrainRole, "train")
    moved = mover(train, PlacementConfig())
    await moved.away(("model",))
    await moved.back(("model", "optimizer"))
    assert calls == [(r, *call) for call in (("offload", True, False), ("onload", True, True)) for r in (0, 1)]
    rollout, _, calls = running(RolloutRole, "rollout")
    moved = mover(rollout, PlacementConfig(sleep_level=2))
    await moved.away(("weights", "kv_cache"))
    await moved.back(("weights",))
    assert calls == [(r, *call) for call in (("sleep", 2), ("wake_up", ("weights",))) for r in (0, 1)]
    sampler, _, calls = running(SamplerRole, "sampler")
    moved = mover(sampler, PlacementConfig(sleep_level=1))
    await moved.away(("weights", "kv_cache"))
    await moved.back(("weights", "kv_cache"))
    assert calls == [(r, *call) for call in (("sleep", 1), ("wake_up", ("weights", "kv_cache"))) for r in (0, 1)]
    models: tuple[type[Role], ...] = (TeacherRole, PRMRole, ORMRole)
    for kind in models:
        model, _, calls = running(kind, "model")
        moved = mover(model, PlacementConfig())
        await moved.away(("model",))
        await moved.back(("model",))
        assert calls == [(r, name) for name in ("offload", "onload") for r in (0, 1)]
    with pytest.raises(TurnError, match="has no parts that move"):
        mover(running(Role, "other")[0], PlacementConfig())


async def test_a_replica_that_dies_is_left_out() -> None:
    rollout, (_, dying), calls = running(RolloutRole, "rollout")
    dying.fault, dying.dies = "the actor died", True
    await mover(rollout, PlacementConfig(sleep_level=1)).away(("weights", "kv_cache"))
    assert calls == [(0, "sleep", 1), (1, "sleep", 1), (0, "sleep", 1)]


@pytest.mark.parametrize(("kind", "parts"), [(RolloutRole, ("weights",)), (TeacherRole, ("model",))])
async def test_a_living_role_that_fails_is_not_asked_again(kind: type[Role], parts: tuple[str, ...]) -> None:
    handle, (first, _), calls = running(kind, "role")
    first.fault = "out of memory"
    with pytest.raises(RoleError, match="out of memory"):
        await mover(handle, PlacementConfig(sleep_level=1)).back(parts)
    assert len(calls) == 2
