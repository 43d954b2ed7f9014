"""The graph without Ray: the same handles over roles in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pytest

from rolegraph.errors import PlanError, RoleError, RoleGraphError
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec, last_line, process_env
from rolegraph.placement import Plan
from rolegraph.role import Role
from tests.rolegraph.fakes import Fake, Plain, batch_of, plan_of, spec_of

LOCAL = GraphOptions(use_ray=False, seed=3)


async def test_the_same_calls_work_in_this_process() -> None:
    async with RoleGraph(plan_of(ranks=1), {"fake": spec_of(Plain)}, LOCAL) as graph:
        fake = graph.handle("fake", Fake)
        assert await fake.doubled([1]) == [1002]
        assert (await fake.identity(batch_of(3))).is_local
        out = await fake.generate(batch_of(5), n=2)
        assert out["uid"].to_pylist() == [f"u{i}" for i in range(5) for _ in range(2)]
        told = (await fake.describe())[0]
        assert told["in_setup_thread"]
        assert told["context"].seed == 3
        slow = fake.record(1, 0.3)
        assert await fake.are_you_there()
        assert not slow.done()
        assert await slow == [[1]]
        with pytest.raises(RoleError, match=r"role fake rank 0 on .* in fail_at\(\): ValueError: boom") as caught:
            await fake.fail_at(0)
        assert caught.value.remote_traceback.count("Traceback") == 1
        assert "host.py" not in caught.value.remote_traceback


async def test_a_lone_replica_gets_the_rows_of_a_queue_in_few_calls() -> None:
    class Alone(Fake):
        queue_rows_alone = 4

    async def sizes(role_class: type[Fake]) -> list[Any]:
        calls: list[Any] = []

        def on_call(role: str, name: str, rank: int, rows: int | None) -> Callable[[], None]:
            calls.append(rows)
            return lambda: None

        async with RoleGraph(plan_of(ranks=1), {"fake": RoleSpec(role_class)}, LOCAL, on_call=on_call) as graph:
            out = await graph.handle("fake", Fake).generate(batch_of(10))
            assert out["uid"].to_pylist() == [f"u{i}" for i in range(10)]
        return calls

    assert await sizes(Fake) == [1] * 10
    assert sorted(await sizes(Alone)) == [3, 3, 4]


def test_blocking_programs_work_too() -> None:
    with RoleGraph(plan_of(ranks=1), {"fake": spec_of()}, LOCAL) as graph:
        assert graph.handle("fake", Fake).doubled.sync([4]) == [8]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_roles_that_share_gpus_start_one_after_another_and_make_room(device: Literal["cpu", "cuda"]) -> None:
    names = ("train", "rollout", "orm")
    on = dict(zip(names, (device, device, "cpu"), strict=True))
    slots = {role: (replace(plan_of(ranks=1).roles["fake"][0], role=role, device=on[role]),) for role in names}
    calls: list[str] = []

    class Slow(Plain):
        def setup(self) -> None:
            calls.append(f"{self.context.role} starts")
            time.sleep(0.2)

    async def ready(role: str, handle: Role) -> None:
        assert isinstance(handle, Fake)
        await handle.rank()
        calls.append(f"{role} is ready")

    plan = Plan(slots, (names,), device)
    async with RoleGraph(plan, {role: spec_of(Slow) for role in names}, LOCAL, on_ready=ready):
        pass
    ends = [calls.index("train is ready"), calls.index("rollout starts")]
    assert sorted(calls) == sorted(f"{role} {what}" for role in names for what in ("starts", "is ready"))
    assert (ends == sorted(ends)) == (device == "cuda"), calls
    assert calls.index("orm starts") < calls.index("train is ready"), "it needs no GPU"


def test_more_than_one_rank_is_refused() -> None:
    with (
        pytest.raises(PlanError, match="use_ray=false runs every role in this process, one rank each, and fake has 2"),
        RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, LOCAL),
    ):
        pass


def test_handles_are_checked() -> None:
    class Other(Role):
        pass

    with pytest.raises(RoleGraphError, match="plan and roles differ in: rollout"):
        RoleGraph(plan_of(ranks=1), {"fake": spec_of(), "rollout": spec_of()}, LOCAL)
    with RoleGraph(plan_of(ranks=1), {"fake": spec_of()}, LOCAL) as graph:
        with pytest.raises(RoleGraphError, match="role fake is a Fake, not a Other"):
            graph.handle("fake", Other)
        with pytest.raises(RoleGraphError, match="no running role 'fakee'; there are: fake"):
            graph.group("fakee")


async def test_a_failing_setup_names_the_role() -> None:
    spec = RoleSpec(Fake, "fail in setup")
    with pytest.raises(RoleError, match=r"in setup\(\): RuntimeError: no weights here"):
        await RoleGraph(plan_of(ranks=1), {"fake": spec}, LOCAL).start()


def test_idle_threads_doze_before_they_sleep() -> None:
    env = process_env(2, ())
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    # Asleep between operators they double a decoding step; awake much longer they take another role's turn.
    assert 1_000 <= int(env["GOMP_SPINCOUNT"]) <= 200_000
    assert env["OMP_NUM_THREADS"] == "2"


async def test_a_role_in_this_process_has_torch_variables_for_as_long_as_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(Fake):
        environment: ClassVar[Mapping[str, str]] = MappingProxyType({"NAMED": "by the role"})

    monkeypatch.setenv("RANK", "7")
    options = GraphOptions(use_ray=False, env={"NCCL_DEBUG": "INFO"})
    async with RoleGraph(plan_of(ranks=1), {"fake": spec_of(Named)}, options) as graph:
        env = (await graph.handle("fake", Fake).describe())[0]["env"]
        assert [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["0", "1", "0", "1"]
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert int(env["MASTER_PORT"]) > 0
        assert (env["NCCL_DEBUG"], env["NAMED"]) == ("INFO", "by the role")
    assert os.environ["RANK"] == "7"
    assert not {"NCCL_DEBUG", "NAMED"} & os.environ.keys()


async def test_a_setup_that_hangs_is_ended_by_its_deadline_with_where_it_hangs() -> None:
    go_on = threading.Event()
    options = GraphOptions(use_ray=False, setup_timeout_s=0.3)
    try:
        with pytest.raises(RoleError) as caught:
            await RoleGraph(plan_of(ranks=1), {"fake": spec_of(config=go_on)}, options).start()
    finally:
        go_on.set()
    message = str(caught.value)
    assert (
        "role fake rank 0 on this machine in setup(): it is not set up after placement.setup_timeout_s=0.3" in message
    )
    assert "setup() has run for 0 s and is at" in message
    assert "self.config.wait()" in message


def test_the_last_line_of_a_log_is_one_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    assert last_line(str(log), since=0.0) == last_line(None, since=0.0) == ""
    log.write_text("loading\n  compiling \n\n")
    assert last_line(str(log), since=0.0) == "compiling"
    os.utime(log, (100.0, 100.0))
    assert last_line(str(log), since=200.0) == "", "an earlier run in this folder wrote it"
