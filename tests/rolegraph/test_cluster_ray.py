"""Placement on a cluster of several nodes with logical GPUs: who sits where, who waits, what a node takes with it."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rolegraph.errors import PlanError, RoleError, RoleGraphError
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.nodes import cluster_inventory, ray_nodes
from rolegraph.parcel import pack
from rolegraph.placement import Inventory, PlacementConfig, Plan, RoleRequest, plan
from rolegraph.role import Mesh
from tests.rolegraph.fakes import Fake, spec_of

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
GAPS, UUIDS = ("2", "5"), ("GPU-0a", "GPU-1b")
"""What CUDA_VISIBLE_DEVICES says on the two nodes that join the first, which has 0 and 1."""


def join(cluster: Cluster, visible: tuple[str, ...]) -> Any:
    """Add a node of 2 CPUs that sees these devices."""
    old = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    try:
        return cluster.add_node(num_cpus=2, num_gpus=len(visible))
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if old is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = old


@pytest.fixture(scope="module")
def nodes(ray_cluster: Cluster) -> Iterator[dict[str, tuple[str, ...]]]:
    """Two more nodes; the devices of all by the names of the nodes."""
    added = {join(ray_cluster, visible).node_id: visible for visible in (GAPS, UUIDS)}
    yield {node.name: added.get(node.id, ("0", "1")) for node in ray_nodes()}
    for node in list(ray_cluster.worker_nodes):
        ray_cluster.remove_node(node)
    deadline = time.monotonic() + 15
    while len(ray_nodes()) > 1 and time.monotonic() < deadline:
        time.sleep(0.2)


TRAIN2 = RoleRequest("train", gpus=2, tensor=2)
ROLLOUT2 = RoleRequest("rollout", gpus=2, tensor=2, is_spmd=False)
TEACHER2 = RoleRequest("teacher", gpus=2, tensor=2, is_spmd=False)
ORM = RoleRequest("orm", light=True, gpus=0, cpus=1)
LAYOUTS = {
    "colocated": ([replace(TRAIN2, gpus=4), replace(ROLLOUT2, gpus=4)], (("train", "rollout"),)),
    "separate": ([TRAIN2, replace(ROLLOUT2, gpus=4)], ()),
    "three ways": ([TRAIN2, ROLLOUT2, TEACHER2], ()),
}


def graph_of(placed: Plan, **options: Any) -> RoleGraph:
    return RoleGraph(
        placed, {role: spec_of() for role in placed.roles}, GraphOptions(**{"timeout_s": 120.0, **options})
    )


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_layout_runs_as_planned(layout: str, nodes: dict[str, tuple[str, ...]]) -> None:
    roles, shared = LAYOUTS[layout]
    placed = plan(cluster_inventory(), roles, PlacementConfig(colocate_groups=shared))
    seen: dict[str, list[tuple[str, str]]] = {}
    async with graph_of(placed, exp_name=layout) as graph:
        for role, slots in placed.roles.items():
            told = await graph.handle(role, Fake).describe()
            on_node = [slot.node for slot in slots]
            for slot, one in zip(slots, told, strict=True):
                context, env = one["context"], one["env"]
                assert context.node == slot.node
                assert (env["RANK"], env["WORLD_SIZE"]) == (str(slot.rank), str(len(slots)))
                assert context.local_rank == on_node[: slot.rank].count(slot.node)
                assert env["LOCAL_WORLD_SIZE"] == str(on_node.count(slot.node))
                assert env["MASTER_ADDR"] == told[0]["context"].address
                assert env["MASTER_PORT"] == told[0]["env"]["MASTER_PORT"]
                devices = [device for device in env["CUDA_VISIBLE_DEVICES"].split(",") if device]
                assert devices == [nodes[slot.node][planned] for planned in slot.device_ids]
                seen.setdefault(role, []).extend((context.node, device) for device in devices)
    assert len(seen["train"]) == len(set(seen["train"])) == len(placed.roles["train"])
    if layout == "colocated":
        assert seen["train"] == seen["rollout"], "they take turns on the same devices"
    else:
        every = [device for devices in seen.values() for device in devices]
        assert len(every) == len(set(every)) == 6, "each role has devices of its own"


@pytest.mark.usefixtures("nodes")
def test_a_tensor_parallel_group_that_would_straddle_nodes_is_refused_at_plan_time() -> None:
    with pytest.raises(PlanError, match=r"(?s)group of 4 GPUs stays on one node, and the largest has 2.*train +4.*#"):
        plan(cluster_inventory(), [RoleRequest("train", gpus=4, tensor=4)], PlacementConfig())


def free() -> dict[str, tuple[int, float]]:
    return {node.name: (len(node.gpus), node.cpus) for node in cluster_inventory(free=True).nodes}


def all_free() -> bool:
    return free() == {node.name: (len(node.gpus), node.cpus) for node in cluster_inventory().nodes}


async def wait_until_free(seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not all_free():
        assert time.monotonic() < deadline, free()
        await asyncio.sleep(0.1)


async def test_a_second_run_fails_with_the_table_waits_or_takes_what_is_free(nodes: dict[str, tuple[str, ...]]) -> None:
    await wait_until_free()
    wanted = [RoleRequest("train", gpus=4)]
    placed = plan(cluster_inventory(), wanted, PlacementConfig())
    here, there, third = nodes
    cpus = {node.name: f"{node.cpus:g} CPU" for node in cluster_inventory().nodes}
    async with graph_of(plan(cluster_inventory(), [TRAIN2, ORM], PlacementConfig()), exp_name="first") as first:
        with pytest.raises(PlanError) as caught:
            await graph_of(placed, exp_name="second", timeout_s=0.5).start()
        text = str(caught.value)
        assert "did not give the devices within placement.timeout_s=0.5 seconds" in text
        assert f"train                         2 GPU on {here}; 2 GPU on {there}" in text
        free_now = next(line for line in text.splitlines() if line.strip().startswith(here))
        assert free_now.split(here)[1].split("  ")[-1].strip() == f"2 GPU, {cpus[here]}"
        assert f"2 GPU, {cpus[third]}" in next(line for line in text.splitlines() if line.strip().startswith(third))
        assert "placement group first/train | orm" in text
        assert f"2 GPU, 1 CPU on {here} (" in text, "with the program that holds it"
        assert f"pid {os.getpid()} on" in text
        # What is free now is enough on the other nodes.
        elsewhere = plan(cluster_inventory(free=True), wanted, PlacementConfig())
        assert {slot.node for slot in elsewhere.roles["train"]} == {there, third}
        async with graph_of(elsewhere, exp_name="beside") as beside:
            assert await beside.handle("train", Fake).rank() == [0, 1, 2, 3]
        late = graph_of(placed, exp_name="third", timeout_s=120)
        waiting = asyncio.ensure_future(late.start())
        await asyncio.sleep(1)
        assert not waiting.done()
        await first.stop()
        await waiting
        await late.stop()


@pytest.mark.usefixtures("nodes")
async def test_an_actor_of_another_program_that_holds_cores_is_named() -> None:
    import ray

    await wait_until_free()
    placed = plan(
        cluster_inventory(), [RoleRequest("orm", 4, light=True, gpus=0, cpus=2)], PlacementConfig(device="cpu")
    )

    @ray.remote(num_cpus=1)
    class Hog:
        def ready(self) -> None: ...

    hog = Hog.options(name="the hog").remote()
    ray.get(hog.ready.remote())
    with pytest.raises(PlanError, match=r"(?s)need\n +orm +.*2 CPU on .*held by\n.*actor .*Hog the hog: 1 CPU on"):
        await graph_of(placed, timeout_s=0.5).start()
    ray.kill(hog)
    await wait_until_free()


@pytest.mark.usefixtures("nodes")
async def test_everything_is_returned_after_an_exception() -> None:
    await wait_until_free()
    placed = plan(cluster_inventory(), [TRAIN2], PlacementConfig())
    with pytest.raises(RoleError, match="boom"):
        async with graph_of(placed) as graph:
            assert not all_free()
            await graph.handle("train", Fake).fail_at(1)
    await wait_until_free()
    placed = plan(cluster_inventory(), [ORM], PlacementConfig())
    with pytest.raises(RoleError, match="no weights here"):
        await RoleGraph(placed, {"orm": RoleSpec(Fake, "fail in setup")}).start()
    await wait_until_free()


DRIVER = """
import asyncio
from rolegraph.cluster import Cluster
from rolegraph.nodes import cluster_inventory
from rolegraph.placement import PlacementConfig, plan
from tests.rolegraph.fakes import Fake
from tests.rolegraph.test_cluster_ray import TRAIN2, ORM, graph_of

async def main():
    Cluster.connect(1)
    async with graph_of(plan(cluster_inventory(), [TRAIN2, ORM], PlacementConfig()), exp_name="stopped") as graph:
        print("ready", flush=True)
        await graph.handle("train", Fake).record(1, 600.0)

asyncio.run(main())
"""


@pytest.mark.usefixtures("nodes")
def test_everything_is_returned_after_ctrl_c(ray_cluster: Cluster) -> None:
    asyncio.run(wait_until_free())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": str(ray_cluster.address)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        assert not all_free()
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=40) != 0
    finally:
        driver.kill()
    asyncio.run(wait_until_free())


async def test_code_of_the_user_reaches_a_node_that_lacks_its_folder(
    nodes: dict[str, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wait_until_free()
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "words_of_mine.py").write_text("WORD = 'from a module beside it'\n")
    (folder / "role_of_mine.py").write_text(
        "from rolegraph.role import endpoint\nfrom tests.rolegraph.fakes import Fake\n\n\nclass Mine(Fake):\n"
        "    @endpoint()\n    def word(self):\n        from words_of_mine import WORD\n        return WORD, __file__\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("role_of_mine").Mine
    there = next(node for node in cluster_inventory().nodes if nodes[node.name] == GAPS)
    placed = plan(Inventory((there,)), [RoleRequest("train", gpus=1)], PlacementConfig())

    def pack_and_hide(*folders: Any) -> Any:
        packed = pack(*folders)
        folder.rename(tmp_path / "hidden")
        return packed

    monkeypatch.setattr("rolegraph.launch.pack", pack_and_hide)
    options = GraphOptions(exp_name="mine", python_path=(str(folder),))
    async with RoleGraph(placed, {"train": RoleSpec(mine)}, options) as graph:
        word, file = (await graph.handle("train", mine).word())[0]
    assert word == "from a module beside it"
    assert "rolegraph-code-" in file


async def test_a_node_that_leaves_in_a_call_is_named_with_its_roles_and_ranks(
    ray_cluster: Cluster, nodes: dict[str, tuple[str, ...]]
) -> None:
    await wait_until_free()
    leaving = join(ray_cluster, ("7",))
    name = next(node.name for node in ray_nodes() if node.id == leaving.node_id)
    inventory = cluster_inventory()
    ordered = Inventory(tuple(sorted(inventory.nodes, key=lambda node: node.name == name)))
    placed = plan(ordered, [RoleRequest("train", gpus=7)], PlacementConfig())
    assert placed.roles["train"][-1].node == name
    small = Plan({"train": tuple(s for s in placed.roles["train"] if s.rank in (0, 6))}, (("train",),), "cuda")
    small = Plan(
        {"train": tuple(replace(s, rank=i, mesh=Mesh(dp=2).at(i)) for i, s in enumerate(small.roles["train"]))},
        small.groups,
        "cuda",
    )
    async with graph_of(small, exp_name="leaves") as graph:
        train = graph.handle("train", Fake)
        call = asyncio.ensure_future(train.record(1, 600.0))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(ray_cluster.remove_node, leaving)
        with pytest.raises(RoleError) as caught:
            await asyncio.wait_for(call, 60)
        assert f"node {name} left the cluster, and with it train rank 1" in str(caught.value)
        assert (caught.value.role, caught.value.rank, caught.value.node) == ("train", 1, name)
        started = time.monotonic()
    assert time.monotonic() - started < 8, "stopping does not wait for the node"
    with pytest.raises(PlanError, match=f"the plan names nodes that are not in the cluster: {name}"):
        await graph_of(small, exp_name="again").start()
    await wait_until_free()


async def test_a_node_that_leaves_while_roles_start_is_an_error(ray_cluster: Cluster) -> None:
    await wait_until_free()
    leaving = join(ray_cluster, ("7",))
    name = next(node.name for node in ray_nodes() if node.id == leaving.node_id)
    inventory = Inventory(tuple(node for node in cluster_inventory().nodes if node.name == name))
    placed = plan(inventory, [RoleRequest("train", gpus=1)], PlacementConfig())
    spec = spec_of(config="hang in setup 0")
    starting = asyncio.ensure_future(RoleGraph(placed, {"train": spec}, GraphOptions(exp_name="early")).start())
    await asyncio.sleep(1.0)
    await asyncio.to_thread(ray_cluster.remove_node, leaving)
    with pytest.raises(RoleGraphError, match=f"node {name} left the cluster, and with it train rank 0"):
        await asyncio.wait_for(starting, 60)
    with pytest.raises(PlanError, match=f"names nodes that are not in the cluster: {name}"):
        await RoleGraph(placed, {"train": spec}).start()
