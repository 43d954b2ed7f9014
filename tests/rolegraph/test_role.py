"""Endpoints on the class, on a role and on a handle; and what mypy makes of a driver program."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolegraph.role import Endpoint, Mesh, Role, RoleContext, endpoint, endpoints
from tests.typed import errors_of

RIGHT = """
from collections.abc import Sequence
from rolegraph.batch import Batch
from rolegraph.graph import RoleGraph
from rolegraph.group import group_of
from rolegraph.interfaces import LossSpec, Metrics, RolloutRole, SamplingParams, TrainRole
from rolegraph.role import Role, endpoint


class Mine(RolloutRole):
    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        batch: Batch = RolloutRole.generate(self, prompts, sampling)
        return batch

    @endpoint(collect=len)
    def counted(self) -> str:
        return ""

    @endpoint(dispatch=lambda n, i, values: values[i])
    def picked(self, values: list[str]) -> str:
        return ""


async def main(graph: RoleGraph, prompts: Batch) -> None:
    rollout: RolloutRole = graph.handle("rollout", RolloutRole)
    train = graph.handle("train", TrainRole)
    mine = graph.handle("rollout", Mine)
    samples: Batch = await rollout.generate(prompts, SamplingParams())
    again: Batch = rollout.generate.sync(prompts, sampling=SamplingParams())
    metrics: Metrics = await train.step(samples, loss=LossSpec("x"), lr=0.1)
    address: tuple[str, int] = await train.rendezvous()
    seconds: list[float] = await train.send_weights(1)
    count: int = await mine.counted()
    texts: list[str] = await group_of(mine).rank(0).picked(["a"])
"""
WRONG = """
    bad_name = await rollout.generat(prompts, SamplingParams())
    bad_argument = await rollout.generate(prompts, 3)
    bad_result: int = await rollout.generate(prompts, SamplingParams())
"""


@pytest.mark.slow
def test_mypy_finds_just_the_three_errors_of_a_driver_program(tmp_path: Path) -> None:
    found = errors_of(tmp_path, RIGHT, WRONG)
    assert len(found) == 3, found
    assert 'has no attribute "generat"; maybe "generate"?' in found[0]
    assert 'has incompatible type "int"; expected "SamplingParams"' in found[1]
    assert 'expression has type "Batch", variable has type "int"' in found[2]


class Base(Role):
    @endpoint(dispatch="slice", collect="flatten")
    def double(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]


class Derived(Base):
    def double(self, values):  # type: ignore[no-untyped-def, override]
        return [value + 1 for value in Base.double(self, values)]


def test_on_the_class_an_endpoint_runs_the_plain_method() -> None:
    role = Derived(None, RoleContext())
    assert Base.double(role, [1]) == [2]
    assert Derived.double(role, [1]) == [3]
    assert role.double([1]) == [3], "in its actor a role's endpoint is its method"


def test_a_plain_override_keeps_options_and_result_type() -> None:
    assert isinstance(Derived.__dict__["double"], Endpoint)
    assert Derived.double.options == Base.double.options
    assert Derived.double.annotation == "list[int]"
    assert set(endpoints(Derived)) == {"double"}
    with pytest.raises(TypeError, match=r"Bad.double overrides an endpoint with 3"):
        type("Bad", (Base,), {"double": 3})


def test_ranks_are_numbered_as_megatron_does() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2, cp=1)
    assert mesh.world_size == 8
    seen = [(m.pp_rank, m.dp_rank, m.tp_rank) for m in map(mesh.at, range(8))]
    assert seen == [(pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)]
