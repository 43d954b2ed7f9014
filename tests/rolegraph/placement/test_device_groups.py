"""`placement.device_groups`: every form of it, every way to get it wrong, and the plan behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rolegraph.config.check import Checker
from rolegraph.errors import PlanError
from rolegraph.placement import Inventory, Node, PlacementConfig, Plan, RoleRequest, plan
from rolegraph.placement.device_groups import DeviceGroups, parse_ranks

BOX = Inventory((Node("box", gpus=(0, 1, 2, 3), cpus=16),))
PAIR = Inventory((Node("a", gpus=(0, 1, 2, 3), cpus=8), Node("b", gpus=(4, 5, 6, 7), cpus=8)))
UNEVEN = Inventory((Node("small", gpus=(0,), cpus=8), Node("big", gpus=(0, 1, 2, 3), cpus=8)))
LAPTOP = Inventory((Node("laptop", cpus=2),))

GROUPS: dict[str, Any] = {
    "nproc_per_node": 4,
    "sample_group": {"device": "GPU", "ranks": [0, 1], "workers": ["sampler"]},
    "rm_group": {"device": "GPU", "ranks": "list(range(2, 4))", "workers": ["prm", "orm"]},
}


def read(node: Any) -> DeviceGroups:
    """The groups of a sound node."""
    checker = Checker()
    found = DeviceGroups.from_config(node, ("placement", "device_groups"), checker)
    assert checker.problems == []
    assert found is not None
    return found


def faults(node: Any) -> str:
    """What is wrong with a faulty node, a line a fault."""
    checker = Checker()
    assert DeviceGroups.from_config(node, ("placement", "device_groups"), checker) is None
    return "\n".join(f"{'.'.join(map(str, problem.path))}: {problem.text}" for problem in checker.problems)


def group(ranks: Any, *workers: str, device: Any = "GPU") -> dict[str, Any]:
    return {"device": device, "ranks": ranks, "workers": list(workers)}


def engine(role: str, **options: Any) -> RoleRequest:
    return RoleRequest(role, is_spmd=False, **options)


def placed(node: Mapping[str, Any], inventory: Inventory, *requests: RoleRequest) -> Plan:
    return plan(inventory, requests, PlacementConfig(device_groups=read(node)))


def refused(node: Mapping[str, Any], inventory: Inventory, *requests: RoleRequest) -> str:
    with pytest.raises(PlanError) as caught:
        placed(node, inventory, *requests)
    return str(caught.value)


def devices(found: Plan, role: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.node, slot.device_ids) for slot in found.roles[role]]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, 2),
        ("2", 2),
        (" 2 ", 2),
        ([0, 1], (0, 1)),
        ([3], (3,)),
        ("[0,1]", (0, 1)),
        ("[ 4, 5 ]", (4, 5)),
        ("list(range(2, 4))", (2, 3)),
        ("list(range(2,4))", (2, 3)),
        ("list(range(3))", (0, 1, 2)),
    ],
)
def test_forms_of_ranks(ranks: Any, expected: Any) -> None:
    assert parse_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, r"0 names no device"),
        ("0", r"'0' names no device.*a list of one is \[0\]"),
        ([], r"\[\] names no device"),
        ("list(range(2, 2))", "names no device"),
        ([0, -1], "has a device below 0"),
        ([0, "1"], r"must be a list of device numbers"),
        ([True], r"must be a list of device numbers"),
        (True, "True must be a number of devices"),
        (1.5, "1.5 must be a number of devices"),
        (None, "None must be a number of devices"),
        ("two", "'two' must be a number of devices.*parsed, not evaluated"),
        ("[0, x]", "must be a number of devices"),
        ("list(range(2)) + [5]", "parsed, not evaluated"),
        ("list(range(1, 9, 2))", "parsed, not evaluated"),
        ("__import__('os').getcwd()", "parsed, not evaluated"),
        ("list(range(0, 9999999999))", "names 9999999999 devices: more than any cluster has"),
        (10**12, "more than any cluster has"),
    ],
)
def test_other_ranks_say_what_to_write(ranks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ranks(ranks)


def test_a_number_takes_what_follows_the_group_before_it() -> None:
    on_cpu = group(3, "text", device="cpu")
    found = read(
        {"a": group(2, "x"), "c": on_cpu, "b": group("2", "y"), "d": group([7], "z"), "e": group(1, "w")}
    )  # fmt: skip
    assert [g.devices for g in found.groups] == [(0, 1), (), (2, 3), (7,), (8,)]
    assert [g.processes for g in found.groups] == [2, 3, 2, 1, 1]


@pytest.mark.parametrize("device", ["GPU", "gpu", "Gpu", "CPU", "cpu"])
def test_device_names_in_any_case(device: str) -> None:
    (found,) = read({"g": group(2, "x", device=device)}).groups
    assert found.device == ("cuda" if device.upper() == "GPU" else "cpu")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"g": group(1, "x", device="NPU")}, "placement.device_groups.g.device: NPU is a device that Ray can hand out"),
        ({"g": group(1, "x", device="tpu")}, "placement.device_groups.g.device: tpu is a device that Ray can hand out"),
        ({"g": group(1, "x", device="cuda")}, "placement.device_groups.g.device: 'cuda' is no device: use GPU or CPU"),
        ({"g": group(1, "x", device=None)}, "placement.device_groups.g.device: None is no device"),
        (
            {"a": group([0, 1], "x"), "b": group([1, 2], "y")},
            "placement.device_groups.b.ranks: device 1 is in group a already",
        ),
        ({"a": group([0, 0], "x")}, "placement.device_groups.a.ranks: device 0 is twice in this group"),
        ({"a": group([2], "x"), "b": group([1], "y"), "c": group(2, "z")}, "c.ranks: device 2 is in group a already"),
        ({"a": group(1, "x"), "b": group(1, "x")}, "placement.device_groups.b.workers: `x` is in group a already"),
        ({"a": group(1, "x", "x")}, "placement.device_groups.a.workers: `x` is twice in this group"),
        ({"a": group(1)}, "placement.device_groups.a.workers: group a is empty"),
        ({"a": {**group(1), "workers": "x"}}, "placement.device_groups.a.workers: 'x' must be a list of names"),
        ({"a": {**group(1), "workers": [3]}}, "placement.device_groups.a.workers: [3] must be a list of names"),
        ({"a": group("nothing", "x")}, "placement.device_groups.a.ranks: 'nothing' must be a number of devices"),
        ({"a": group([0, 1], "x", device="CPU")}, "a.ranks: [0, 1] must be the number of processes of each worker"),
        ({"a": group(0, "x", device="CPU")}, "a.ranks: 0 must be the number of processes of each worker"),
        ({"a": group("[0]", "x", device="CPU")}, "a.ranks: '[0]' must be the number of processes of each worker"),
        ({"a": {"device": "CPU", "ranks": 1}}, "placement.device_groups.a.workers: is missing"),
        ({"a": {"device": "CPU", "workers": ["x"]}}, "placement.device_groups.a.ranks: is missing"),
        ({"a": {"ranks": 1, "workers": ["x"]}}, "placement.device_groups.a.device: is missing"),
        ({"a": {**group(1, "x"), "rank": 3}}, "a.rank: unknown key; did you mean placement.device_groups.a.ranks?"),
        ({"a": 3}, "placement.device_groups.a: 3 must be a node with device, ranks, workers"),
        ({"nproc_pernode": 3, "a": group(1, "x")}, "nproc_pernode: 3 must be a node.*did you mean nproc_per_node?"),
        ({"nproc_per_node": 0, "a": group(1, "x")}, "placement.device_groups.nproc_per_node: 0 must be the least GPUs"),
        ({"nproc_per_node": "4", "a": group(1, "x")}, "nproc_per_node: '4' must be the least GPUs"),
        ({"nproc_per_node": {}, "a": group(1, "x")}, "nproc_per_node: {} must be the least GPUs"),
        ({"nproc_per_node": 4}, "placement.device_groups: names no group"),
        ({}, "placement.device_groups: names no group"),
        ([group(1, "x")], "must be a node with a key for each group"),
    ],
)
def test_malformed_groups_are_named(node: Any, message: str) -> None:
    *before, last = message.split(".*")
    text = faults(node)
    assert all(part in text for part in [*before, last]), text


def test_all_faults_come_together() -> None:
    text = faults({"a": {"device": "NPU", "ranks": "x", "worker": ["y"]}, "b": 1})
    assert text.count("\n") == 3, text


def test_the_design_page_example() -> None:
    found = placed(GROUPS, BOX, engine("sampler"), engine("prm"), engine("orm", gpus=0, light=True))
    assert devices(found, "sampler") == [("box", (0,)), ("box", (1,))]
    assert devices(found, "prm") == [("box", (2,)), ("box", (3,))]
    assert [slot.device for slot in found.roles["orm"]] == ["cpu"], "what needs no device takes none"
    assert found.groups == (("sampler",), ("prm", "orm"))
    assert found.device == "cuda"


def test_workers_of_a_group_share_its_devices() -> None:
    node = {"g": group([1, 0], "sampler", "prm"), "h": group(2, "teacher")}
    found = placed(node, BOX, engine("sampler"), engine("prm", tensor=2), RoleRequest("teacher", tensor=2))
    assert devices(found, "sampler") == [("box", (1,)), ("box", (0,))], "in the order in which they are written"
    assert devices(found, "prm") == [("box", (1, 0))]
    assert devices(found, "teacher") == [("box", (2,)), ("box", (3,))], "after the last of them"
    assert found.is_shared("prm")
    assert not found.is_shared("teacher")


def test_devices_count_through_the_cluster_node_by_node() -> None:
    found = placed({"g": group([3, 4], "sampler"), "h": group(2, "prm")}, PAIR, engine("sampler"), engine("prm"))
    assert devices(found, "sampler") == [("a", (3,)), ("b", (4,))]
    assert devices(found, "prm") == [("b", (5,)), ("b", (6,))]


def test_nodes_with_fewer_devices_are_passed_over() -> None:
    node = {"g": group([0, 1], "sampler")}
    assert devices(placed(node, UNEVEN, engine("sampler")), "sampler") == [("small", (0,)), ("big", (0,))]
    found = placed({"nproc_per_node": 2, **node}, UNEVEN, engine("sampler"))
    assert devices(found, "sampler") == [("big", (0,)), ("big", (1,))]
    beside = PlacementConfig(device_groups=read(node), nproc_per_node=2)
    assert devices(plan(UNEVEN, [engine("sampler")], beside), "sampler") == [("big", (0,)), ("big", (1,))]
    message = refused({"nproc_per_node": 2, "g": group(5, "sampler")}, UNEVEN, engine("sampler"))
    assert "placement.device_groups.g asks for device 4, and the cluster has devices 0 to 3" in message
    assert "nodes with fewer GPUs than nproc_per_node=2 are passed over (small has 1)" in message
    message = refused({"nproc_per_node": 8, "g": group(5, "sampler")}, UNEVEN, engine("sampler"))
    assert "the cluster has no devices; nodes with fewer GPUs than nproc_per_node=8" in message


def test_cpu_groups_are_processes() -> None:
    node = {"nproc_per_node": 4, "g": group(2, "sampler", "prm", device="CPU"), "h": group(1, "orm", device="CPU")}
    found = placed(node, LAPTOP, engine("sampler"), engine("prm"), RoleRequest("orm"))
    assert {role: len(slots) for role, slots in found.roles.items()} == {"sampler": 2, "prm": 2, "orm": 1}
    assert {slot.device for slots in found.roles.values() for slot in slots} == {"cpu"}
    assert found.groups == (("sampler", "prm"), ("orm",))
    assert [slot.cores for slot in found.roles["sampler"]] == [slot.cores for slot in found.roles["prm"]]
    assert sum(slot.cores for role in ("sampler", "orm") for slot in found.roles[role]) <= 2


def test_a_cpu_group_beside_a_gpu_group() -> None:
    node = {"g": group(2, "sampler"), "h": group(3, "orm", device="cpu")}
    found = placed(node, BOX, engine("sampler"), engine("orm"))
    assert devices(found, "sampler") == [("box", (0,)), ("box", (1,))]
    assert devices(found, "orm") == [("box", ())] * 3
    assert found.device == "cuda"


def test_default_is_the_train_role_of_a_plain_run() -> None:
    node = {"g": group(2, "default")}
    assert devices(placed(node, BOX, RoleRequest("train")), "train") == [("box", (0,)), ("box", (1,))]
    message = refused(node, BOX, RoleRequest("train"), engine("rollout"))
    assert "placement.device_groups.g names the worker `default`, which stands for the train role of a plain" in message
    assert "name the roles of this run, train, rollout" in message
    message = refused({"g": group(2, "default"), "h": group(1, "train")}, BOX, RoleRequest("train"))
    assert "placement.device_groups.h has the role `train` once more, after group g: `default` is train" in message


def test_workers_and_roles_are_the_same() -> None:
    message = refused({"g": group(2, "sampler", "prn")}, BOX, engine("sampler"), engine("prm"))
    assert (
        "placement.device_groups.g names the worker `prn`, which takes no part in this run; did you mean prm?"
        in message
    )
    assert "placement.device_groups has no group with the role `prm`: add it to the workers of one (g)" in message
    found = placed({"g": group(2, "sampler")}, BOX, engine("sampler"), engine("orm", gpus=0, light=True))
    assert devices(found, "orm") == [("box", ())], "a light role may stand beside"


@pytest.mark.parametrize(
    ("node", "inventory", "request_", "message"),
    [
        ({"g": group([3, 4, 5], "x")}, BOX, engine("x"), "g asks for devices 4, 5, and the cluster has"),
        ({"g": group(1, "x")}, LAPTOP, engine("x"), "g is on GPUs, and none is on laptop: write device: CPU"),
        ({"g": group(2, "x")}, BOX, engine("x", gpus=4), "x.gpus=4, and placement.device_groups.g has 2 devices"),
        ({"g": group(2, "x")}, BOX, engine("x", count=1), "x.replicas=1, and placement.device_groups.g has 2 devices"),
        ({"g": group(2, "x")}, BOX, RoleRequest("x", 4), "x.ranks=4, and placement.device_groups.g has 2 devices"),
        ({"g": group(3, "x")}, BOX, engine("x", tensor=2), "g has 3 devices: the model-parallel size 2 of x does not"),
        ({"g": group(2, "x", device="cpu")}, LAPTOP, engine("x", count=1), "x.replicas=1, and .*g has 2 processes"),
        ({"g": group(1, "x", device="cpu")}, LAPTOP, engine("x", gpus=1), "x.gpus=1, and .*g is on CPUs"),
        ({"g": group(3, "x", device="cpu")}, LAPTOP, RoleRequest("x", tensor=2), "g has 3 processes: the"),
        ({"g": group([3, 4], "x")}, PAIR, engine("x", tensor=2), "g puts an engine of x, 2 devices, across a and b"),
        ({"g": group([3, 4], "x")}, PAIR, RoleRequest("x", tensor=2), "g puts a tensor-parallel group of x, 2 devices"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_group_and_shows_the_table(
    node: dict[str, Any], inventory: Inventory, request_: RoleRequest, message: str
) -> None:
    text = refused(node, inventory, request_)
    assert all(part in text for part in message.split(".*")), text
    assert "placement.device_groups.g" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:1] == ["need"] for row in rows)
    assert any(row[:1] == ["have"] for row in rows)


def test_both_notations_at_once_are_refused() -> None:
    named = read({"g": group(1, "x")})
    both = PlacementConfig(device_groups=named, colocate_groups=(("x", "y"),), device="cpu", nproc_per_node=3)
    text = "\n".join(both.problems())
    assert "placement.device_groups and placement.colocate_groups are two notations for one thing: keep one" in text
    assert "placement.device=cpu, and each group of placement.device_groups says its own" in text
    assert list(PlacementConfig(nproc_per_node=4).problems()) == [
        "placement.nproc_per_node belongs to placement.device_groups, and there are none: remove it"
    ]
    twice = PlacementConfig(device_groups=read({"nproc_per_node": 2, "g": group(1, "x")}), nproc_per_node=3)
    assert "placement.nproc_per_node=3, and placement.device_groups.nproc_per_node=2" in "\n".join(twice.problems())
