"""Bundles, nodes and devices as plain data, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph.cluster import Cluster
from rolegraph.host import process_env, torch_env
from rolegraph.nodes import Holder, find_node, named
from rolegraph.placement import Inventory, Node, PlacementConfig, Plan, RoleRequest, Slot, plan
from rolegraph.placement.device_groups import DeviceGroup, DeviceGroups
from rolegraph.reservation import Reservation, bundles_of, order_devices
from rolegraph.role import Mesh, RoleContext
from rolegraph.run import _place


def record(address: str, node_id: str, *, alive: bool = True, **resources: float) -> Mapping[str, Any]:
    return {"NodeID": node_id, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_nodes_go_by_their_address_in_the_order_of_numbers() -> None:
    nodes = named([record("10.0.0.10", "aaa"), record("10.0.0.9", "bbb"), record("10.0.0.8", "ccc", alive=False)])
    assert [node.name for node in nodes] == ["10.0.0.9", "10.0.0.10"]
    assert nodes[0].selector == {"ray.io/node-id": "bbb"}


def test_nodes_that_share_an_address_are_told_apart_by_their_ids() -> None:
    nodes = named([record("10.0.0.1", "f00baa77"), record("10.0.0.1", "ba5eba11"), record("10.0.0.2", "c0ffee00")])
    assert [node.name for node in nodes] == ["10.0.0.1#ba5eba", "10.0.0.1#f00baa", "10.0.0.2"]
    assert [found.id for node in nodes if (found := find_node(node.name, nodes))] == [node.id for node in nodes]
    assert find_node("10.0.0.1", nodes) is None, "two nodes have this address"
    assert find_node("this machine", nodes) is None
    # Its namesake has left: the name that the plan was made with still leads to it.
    assert find_node("10.0.0.1#ba5eba", nodes[:1]) == nodes[0]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (["5", "2"], ["2", "5"]),  # CUDA_VISIBLE_DEVICES=2,5
        (["10", "9"], ["9", "10"]),
        (["GPU-b1", "GPU-a2"], ["GPU-a2", "GPU-b1"]),
        (["MIG-7/1/0", "3"], ["3", "MIG-7/1/0"]),
    ],
)
def test_devices_follow_each_other_as_planned_whatever_order_they_came_in(got: list[str], expected: list[str]) -> None:
    found = order_devices({"n0": [1, 0]}, {"n0": got})
    assert [found["n0", 0], found["n0", 1]] == expected


def test_colocated_roles_share_one_bundle_of_the_larger_request() -> None:
    def slots(role: str, ranks: int, cores: float) -> tuple[Slot, ...]:
        mesh = Mesh(dp=ranks)
        return tuple(Slot(role, i, "n0", "cpu", (), cores, 1, mesh.at(i)) for i in range(ranks))

    found = bundles_of(
        Plan({"train": slots("train", 2, 1.0), "rollout": slots("rollout", 1, 1.5)}, (("train", "rollout"),), "cpu")
    )
    assert found.resources == [{"CPU": 2.0}]
    assert found.cpu_of["n0", "train"] == found.cpu_of["n0", "rollout"] == 0
    assert found.share["n0", "train"] * 3 <= 2.0


def test_gpu_bundles_are_one_a_device_in_the_order_of_the_plan() -> None:
    nodes = Inventory((Node("10.0.0.1", (0, 1), 4.0), Node("10.0.0.2", (0, 1), 4.0)))
    roles = [
        RoleRequest("train", gpus=2),
        RoleRequest("rollout", gpus=2),
        RoleRequest("orm", light=True, gpus=0, cpus=1),
    ]
    found = bundles_of(plan(nodes, roles, PlacementConfig()))
    assert found.resources == [{"GPU": 1.0}] * 4 + [{"CPU": 1.0}]
    assert found.nodes == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1"]
    assert found.groups == [0, 0, 1, 1, 2]
    assert found.gpu_of == {("10.0.0.1", 0): 0, ("10.0.0.1", 1): 1, ("10.0.0.2", 0): 2, ("10.0.0.2", 1): 3}


def test_cores_that_roles_on_gpus_ask_for_are_reserved_beside_them() -> None:
    nodes = Inventory((Node("10.0.0.1", (0, 1), 16.0), Node("10.0.0.2", (0, 1), 16.0)))
    roles = [RoleRequest("train", gpus=4, cpus=3), RoleRequest("rollout", gpus=4, tensor=2, is_spmd=False, cpus=4)]
    shared = bundles_of(plan(nodes, roles, PlacementConfig(colocate_groups=(("train", "rollout"),))))
    # In its turn train asks for 6 cores of a node, and rollout for 4.
    assert shared.resources == [{"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 6.0}] * 2
    assert shared.nodes == ["10.0.0.1"] * 3 + ["10.0.0.2"] * 3
    assert shared.gpu_of == {("10.0.0.1", 0): 0, ("10.0.0.1", 1): 1, ("10.0.0.2", 0): 3, ("10.0.0.2", 1): 4}
    assert shared.cpu_of == {}, "nobody sits there"


def test_roles_without_cores_of_their_own_are_bound_to_their_node_all_the_same() -> None:
    nodes = Inventory((Node("10.0.0.1", (), 4.0), Node("10.0.0.2", (), 4.0)))
    placed = plan(nodes, [RoleRequest("orm", 2, light=True, gpus=0)], PlacementConfig())
    reservation = Reservation(placed)
    assert reservation.bundles.resources == []
    reservation.nodes = {
        node.name: node for node in named([record("10.0.0.1", "a" * 56), record("10.0.0.2", "b" * 56)])
    }
    options = [reservation.seat(slot).options for slot in placed.roles["orm"]]
    assert [one["num_cpus"] for one in options] == [0, 0]
    assert [one["scheduling_strategy"].node_id for one in options] == ["a" * 56, "b" * 56]
    assert not any(one["scheduling_strategy"].soft for one in options), "elsewhere it would not be as planned"
    reservation.nodes = {}
    assert reservation.seat(placed.roles["orm"][0]).options == {"num_cpus": 0}


def test_a_lost_node_is_named_with_its_roles_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    nodes = Inventory((Node("10.0.0.1", (0, 1), 4.0), Node("10.0.0.2", (0, 1), 4.0)))
    roles = [RoleRequest("train", gpus=3), RoleRequest("rollout", gpus=1, is_spmd=False)]
    reservation = Reservation(plan(nodes, roles, PlacementConfig()))
    reservation.nodes = {node.name: node for node in named([record("10.0.0.1", "aa"), record("10.0.0.2", "bb")])}
    monkeypatch.setattr(ray, "nodes", lambda: [record("10.0.0.1", "aa"), record("10.0.0.2", "bb", alive=False)])
    assert reservation.lost_message() == "node 10.0.0.2 left the cluster, and with it train rank 2, rollout rank 0"
    assert reservation.lost_message("10.0.0.1") is None, "whoever died there died of something else"
    assert reservation.lost_message("10.0.0.2")
    monkeypatch.setattr(ray, "nodes", list)
    assert "node 10.0.0.1 left the cluster, and with it train ranks 0-1; node" in str(reservation.lost_message())


def test_what_holds_resources_is_named_with_its_program() -> None:
    held = Holder("placement group other/train", {"n1": {"GPU": 2.0}, "": {"CPU": 1.0}}, "python b.py, pid 7 on n1")
    assert held.line() == "placement group other/train: 2 GPU on n1; waits for 1 CPU (python b.py, pid 7 on n1)"


def test_torch_variables_count_ranks_in_all_and_on_the_node() -> None:
    context = RoleContext(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="10.0.0.1", master_port=29500
    )
    assert torch_env(context) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_local_rank_is_a_device_that_the_process_sees() -> None:
    slot = Slot("train", 3, "n0", "cuda", (1,), 1.0, 1, Mesh(dp=4).at(3))
    context = RoleContext(rank=3, world_size=4, local_rank=1, local_world_size=2, device="cuda", device_ids=("GPU-1f",))
    env = process_env(slot.threads, context.device_ids) | torch_env(context)
    assert env["CUDA_VISIBLE_DEVICES"].split(",")[int(env["LOCAL_RANK"])] == "GPU-1f"


def test_a_run_takes_what_is_free_and_plans_to_wait_where_that_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Inventory((Node("n0", (0, 1), 4.0), Node("n1", (0, 1), 4.0)))
    free = Inventory((Node("n0", (), 0.0), Node("n1", (0, 1), 4.0)))
    joined = Cluster(is_ours=False, is_joined=True)
    monkeypatch.setattr(Cluster, "connect", lambda *_: joined)
    monkeypatch.setattr("rolegraph.nodes.cluster_inventory", lambda *, free=False: left[0] if free else whole)

    def placed(gpus: int | None, placement: PlacementConfig | None = None) -> set[str]:
        train = SimpleNamespace(config=SimpleNamespace(gpus=gpus))
        config: Any = SimpleNamespace(use_ray=True, roles={"train": train}, placement=placement or PlacementConfig())
        found = _place(config, AsyncExitStack())
        assert found.device == "cuda"
        return {slot.node for slot in found.roles["train"]}

    left = [free]
    assert placed(gpus=2) == {"n1"}, "n0 is somebody else's"
    assert placed(gpus=4) == {"n0", "n1"}, "to wait for n0"
    left = [Inventory((Node("n0", (), 4.0), Node("n1", (), 4.0)))]
    assert placed(gpus=2) == {"n0"}, "not on the cores, which are free"
    named = DeviceGroups((DeviceGroup("g", "cuda", (0, 1), 2, ("train",)),))
    assert placed(None, PlacementConfig(device_groups=named)) == {"n0"}, "numbers count what others hold too"
