"""The graph's life on Ray: shortage, names, two roles side by side, and what signals leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest

from rolegraph.errors import PlanError
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import RoleGroup
from rolegraph.host import descendants
from rolegraph.placement import Plan, Slot
from rolegraph.role import Mesh, endpoint
from tests.rolegraph.fakes import Fake, is_running, plan_of, spec_of, wait_gone

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]

DRIVER = """
import asyncio, sys
from rolegraph.graph import GraphOptions, RoleGraph
from tests.rolegraph.fakes import Fake, plan_of, spec_of

async def main():
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, GraphOptions(run_dir=sys.argv[1])) as graph:
        fake = graph.handle("fake", Fake)
        children = await fake.spawn_child()
        print("ready", *children, flush=True)
        await fake.record(1, 600.0)

asyncio.run(main())
"""


@pytest.mark.usefixtures("ray_cluster")
async def test_too_few_cores_fail_with_need_and_have() -> None:
    plan = plan_of(ranks=2, cores=8.0)
    started = time.perf_counter()
    with pytest.raises(
        PlanError, match=r"(?s)placement.timeout_s=0.5.*need\n.*fake +16 CPU on this machine\n.*have.*4 CPU"
    ):
        await RoleGraph(plan, {"fake": spec_of()}, GraphOptions(timeout_s=0.5)).start()
    assert time.perf_counter() - started < 5


@pytest.mark.usefixtures("ray_cluster")
async def test_two_runs_of_one_name_are_kept_apart() -> None:
    options = GraphOptions(exp_name="twins")
    async with RoleGraph(plan_of(ranks=1), {"fake": spec_of()}, options):
        with pytest.raises(PlanError, match="a run named 'twins' is on this cluster already"):
            await RoleGraph(plan_of(ranks=1), {"fake": spec_of()}, options).start()
        other = GraphOptions(exp_name="other")
        async with RoleGraph(plan_of(ranks=1), {"fake": spec_of()}, other) as graph:
            assert await graph.handle("fake", Fake).rank() == [0]


@pytest.mark.usefixtures("ray_cluster")
async def test_colocated_roles_start_side_by_side_and_share_cores() -> None:
    one, two = plan_of("one", 2, cores=2.0), plan_of("two", 2, cores=2.0)
    plan = Plan({**one.roles, **two.roles}, (("one", "two"),), "cpu")
    async with RoleGraph(plan, {"one": spec_of(), "two": spec_of()}, GraphOptions(exp_name="two")) as graph:
        assert await graph.handle("one", Fake).rank() == await graph.handle("two", Fake).rank() == [0, 1]
        assert set(graph.startup) == {"one", "two"}


@pytest.mark.usefixtures("ray_cluster")
async def test_a_rank_sees_the_devices_that_its_bundle_got() -> None:
    slots = tuple(Slot("fake", i, "this machine", "cuda", (i,), 1.0, 1, Mesh(dp=2).at(i)) for i in range(2))
    plan = Plan({"fake": slots}, (("fake",),), "cuda")
    async with RoleGraph(plan, {"fake": spec_of()}, GraphOptions(exp_name="gpus")) as graph:
        told = await graph.handle("fake", Fake).describe()
    assert [one["devices"] for one in told] == [str(one["context"].device_ids[0]) for one in told]
    assert {one["devices"] for one in told} == {"0", "1"}


class Frugal(Fake):
    """A role whose processes are to be started with variables of their own."""

    environment: ClassVar[Mapping[str, str]] = MappingProxyType({"MALLOC_ARENA_MAX": "1", "NAMED": "by the role"})

    @endpoint()
    def started_with(self) -> dict[str, str]:
        """The variables at the start of the process, which `os.environ` does not tell."""
        pairs = Path("/proc/self/environ").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@pytest.mark.usefixtures("ray_cluster")
async def test_what_a_role_names_is_there_when_its_process_starts() -> None:
    options = GraphOptions(exp_name="frugal", env={"NAMED": "by the config"})
    async with RoleGraph(plan_of(ranks=1), {"fake": spec_of(Frugal)}, options) as graph:
        fake = graph.handle("fake", Frugal)
        (early,), (told,) = await fake.started_with(), await fake.describe()
    for env in (early, told["env"]):
        assert (env["MALLOC_ARENA_MAX"], env["NAMED"]) == ("1", "by the config")


@pytest.mark.usefixtures("ray_cluster")
async def test_a_taken_rendezvous_port_is_retried(tmp_path: Path) -> None:
    spec = spec_of(Fake, tmp_path / "was here")
    async with RoleGraph(plan_of(ranks=1), {"fake": spec}, GraphOptions(exp_name="port")) as graph:
        assert await graph.handle("fake", Fake).rank() == [0]
        assert await graph.group("fake").health() == [True]


@pytest.mark.usefixtures("ray_cluster")
async def test_a_slow_start_tells_where_it_is_and_the_end_of_its_log(tmp_path: Path) -> None:
    graph = RoleGraph(
        plan_of(ranks=2), {"fake": spec_of(config="hang in setup 1")}, GraphOptions(run_dir=str(tmp_path))
    )
    starting = asyncio.ensure_future(graph.start())
    log = tmp_path / "logs" / "fake-1.log"
    while not (log.exists() and log.read_text()):
        assert not starting.done()
        await asyncio.sleep(0.1)
    assert graph.still_starting() == ["fake (its log ends: asking the hub for weights)"]
    group = RoleGroup(Fake, graph._launcher.launched[1:], Mesh())
    message = str(await group.explain_slow_start("it is slow"))
    starting.cancel()
    assert "role fake rank 1 on" in message
    assert "in setup(): it is slow\n" in message
    assert "time.sleep(600)" in message
    assert f"End of {log}:\nasking the hub for weights" in message
    with pytest.raises(asyncio.CancelledError):
        await starting


def ignore_ctrl_c() -> None:
    """As a shell does for the background jobs of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("number", "before"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGTERM, ignore_ctrl_c)],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM in the background of a script"],
)
def test_a_signal_in_the_middle_of_a_call_frees_every_process(
    number: int, before: Callable[[], None] | None, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env, preexec_fn=before
    )
    assert driver.stdout is not None
    try:
        line = driver.stdout.readline()
        assert line.startswith("ready"), line + driver.stdout.read()
        children = [int(word) for word in line.split()[1:]]
        family = descendants(driver.pid)
        assert len(family) > 5
        assert all(is_running(pid) for pid in children)
        time.sleep(0.5)
        started = time.perf_counter()
        driver.send_signal(number)
        driver.wait(timeout=20)
        assert wait_gone([*family, *children], seconds=2) == []
        assert time.perf_counter() - started < 10
        assert driver.returncode != 0
    finally:
        driver.kill()
