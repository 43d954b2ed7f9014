"""Placement rules, on made-up machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.errors import PlanError
from rolegraph.placement import Inventory, Node, PlacementConfig, Plan, RoleRequest, plan

LAPTOP = Inventory((Node("laptop", cpus=2),))
BOX = Inventory((Node("box", gpus=(0, 1, 2, 3), cpus=16),))
PAIR = Inventory((Node("a", gpus=(0, 1, 2), cpus=8), Node("b", gpus=(4, 5, 7), cpus=8)))
TOGETHER = PlacementConfig(colocate_groups=(("train", "rollout"),))
APART = PlacementConfig()


def train(count: int | None = None, **options: object) -> RoleRequest:
    return RoleRequest("train", count, **options)  # type: ignore[arg-type]


def rollout(count: int | None = None, **options: object) -> RoleRequest:
    return RoleRequest("rollout", count, is_spmd=False, **options)  # type: ignore[arg-type]


ORM = RoleRequest("orm", gpus=0, is_spmd=False, light=True)


def devices(placed: Plan, role: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.node, slot.device_ids) for slot in placed.roles[role]]


def test_colocated_on_a_cpu_each_role_has_all_cores_in_its_turn() -> None:
    placed = plan(LAPTOP, [train(), rollout(2), ORM], PlacementConfig(colocate_groups=(("train", "rollout", "orm"),)))
    assert [(s.role, s.rank, s.cores, s.threads) for slots in placed.roles.values() for s in slots] == [
        ("train", 0, 2.0, 2),
        ("rollout", 0, 1.0, 1),
        ("rollout", 1, 1.0, 1),
        ("orm", 0, 2.0, 2),
    ]
    assert placed.is_shared("train")
    assert placed.group_of("orm") == ("train", "rollout", "orm")
    assert placed.device == "cpu"


def test_separate_on_two_cores_divides_down_to_fractions() -> None:
    placed = plan(LAPTOP, [train(2, tensor=2), rollout(2), ORM], APART)
    assert [slot.cores for slot in placed.roles["train"]] == [0.5, 0.5]
    assert [slot.threads for slot in placed.roles["rollout"]] == [1, 1]
    assert [(slot.cores, slot.threads) for slot in placed.roles["orm"]] == [(0.0, 2)]
    assert not placed.is_shared("train")


def test_named_cores_are_served_first() -> None:
    placed = plan(Inventory((Node("n", cpus=8),)), [train(2, cpus=3), rollout(1)], APART)
    assert [slot.threads for slot in placed.roles["train"]] == [3, 3]
    assert [slot.threads for slot in placed.roles["rollout"]] == [2]


def test_a_colocate_group_needs_its_largest_role_not_the_sum() -> None:
    placed = plan(LAPTOP, [train(2, cpus=1), rollout(1, cpus=2)], TOGETHER)
    assert [slot.threads for slot in placed.roles["rollout"]] == [2]
    with pytest.raises(PlanError, match="no room for `train`, `rollout`"):
        plan(LAPTOP, [train(2, cpus=1.5), rollout(1, cpus=2)], TOGETHER)


def test_no_room_shows_need_and_have() -> None:
    with pytest.raises(PlanError) as caught:
        plan(LAPTOP, [train(1, cpus=1.5), rollout(1, cpus=1)], APART)
    message = str(caught.value)
    assert "no room for `rollout`" in message
    assert "rollout.cpus or rollout.replicas" in message
    rows = [line.split() for line in message.splitlines()]
    assert ["train", "1.5", "(1", "ranks)"] in rows
    assert ["in", "all", "2.5"] in rows
    assert ["laptop", "2"] in rows


def test_gpus_without_any() -> None:
    with pytest.raises(PlanError, match=r"train\.gpus=4, and this run has no GPU.*set train\.ranks"):
        plan(LAPTOP, [train(gpus=4), rollout()], APART)
    with pytest.raises(PlanError, match=r"placement\.device=gpu, and no GPU is on laptop"):
        plan(LAPTOP, [train()], PlacementConfig(device="gpu"))


def test_separate_on_gpus() -> None:
    placed = plan(BOX, [train(gpus=2), rollout(gpus=2, tensor=2), ORM], APART)
    assert devices(placed, "train") == [("box", (0,)), ("box", (1,))]
    assert devices(placed, "rollout") == [("box", (2, 3))]
    assert devices(placed, "orm") == [("box", ())]
    assert [slot.device for slot in placed.roles["orm"]] == ["cpu"]
    assert [slot.threads for slot in placed.roles["train"]] == [4, 4]
    assert [slot.threads for slot in placed.roles["rollout"]] == [8]


def test_colocated_on_gpus_share_and_a_silent_role_takes_the_groups_number() -> None:
    placed = plan(BOX, [train(gpus=4, tensor=2), rollout(tensor=2)], TOGETHER)
    assert devices(placed, "rollout") == [("box", (0, 1)), ("box", (2, 3))]
    assert devices(placed, "train") == [("box", (i,)) for i in range(4)]
    assert [slot.threads for slot in placed.roles["train"]] == [4] * 4
    with pytest.raises(PlanError, match=r"these differ: train\.gpus=4, rollout\.gpus=2"):
        plan(BOX, [train(gpus=4), rollout(gpus=2)], TOGETHER)


def test_device_cpu_on_a_machine_with_gpus() -> None:
    assert plan(BOX, [train()], PlacementConfig(device="cpu")).roles["train"][0].device == "cpu"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (train(gpus=3, tensor=2), r"train\.gpus=3 does not divide by the model-parallel size 2 \(tensor 2"),
        (train(3, pipeline=2), r"train\.ranks=3 does not divide"),
        (train(2, gpus=4), r"train\.ranks=2 needs 2 GPUs, and train\.gpus=4"),
        (rollout(2, gpus=2, tensor=2), r"rollout\.replicas=2 needs 4 GPUs, and rollout\.gpus=2"),
        (train(4, expert=3), r"expert_model_parallel_size=3 does not divide the 4 ranks"),
    ],
)
def test_numbers_of_one_role_agree(request_: RoleRequest, expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        plan(BOX, [request_], APART)


def test_tensor_parallel_groups_stay_on_a_node() -> None:
    placed = plan(PAIR, [train(gpus=4, tensor=2)], APART)
    assert devices(placed, "train") == [("a", (0,)), ("a", (1,)), ("b", (4,)), ("b", (5,))]
    with pytest.raises(PlanError, match="no room"):
        plan(PAIR, [rollout(gpus=4, tensor=4)], APART)
    cpus = Inventory((Node("a", cpus=3), Node("b", cpus=3)))
    placed = plan(cpus, [train(4, tensor=2)], APART)
    assert [slot.node for slot in placed.roles["train"]] == ["a", "a", "b", "b"]


def test_ranks_count_in_megatrons_order() -> None:
    placed = plan(Inventory((Node("n", cpus=8),)), [train(8, tensor=2, pipeline=2)], APART)
    assert [(s.mesh.tp_rank, s.mesh.dp_rank, s.mesh.pp_rank) for s in placed.roles["train"]] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_groups_of_roles_that_are_not_there() -> None:
    with pytest.raises(PlanError, match="names `rollout`, which takes no part"):
        plan(LAPTOP, [train()], TOGETHER)


@given(
    cores=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    ranks=st.integers(1, 6),
    tensor=st.sampled_from([1, 2]),
    replicas=st.integers(1, 5),
    shared=st.booleans(),
)
def test_cores_are_never_handed_out_twice(
    cores: list[int], ranks: int, tensor: int, replicas: int, shared: bool
) -> None:
    inventory = Inventory(tuple(Node(str(i), cpus=c) for i, c in enumerate(cores)))
    placed = plan(inventory, [train(ranks * tensor, tensor=tensor), rollout(replicas)], TOGETHER if shared else APART)
    for node in inventory.nodes:
        used = [sum(s.cores for s in slots if s.node == node.name) for slots in placed.roles.values()]
        assert (max(used) if shared else sum(used)) <= node.cpus + 1e-6
    for slots in placed.roles.values():
        assert [slot.rank for slot in slots] == list(range(len(slots)))
    for first in range(0, ranks * tensor, tensor):
        assert len({slot.node for slot in placed.roles["train"][first : first + tensor]}) == 1


@given(gpus=st.integers(1, 6), tensor=st.sampled_from([1, 2, 4]), nodes=st.integers(1, 4))
def test_a_gpu_belongs_to_one_group(gpus: int, tensor: int, nodes: int) -> None:
    inventory = Inventory(tuple(Node(str(i), gpus=tuple(range(8)), cpus=32) for i in range(nodes)))
    requests = [rollout(gpus=gpus * tensor, tensor=tensor), train(gpus=gpus)]
    if gpus * (tensor + 1) > 8 * nodes:
        with pytest.raises(PlanError, match="no room"):
            plan(inventory, requests, APART)
        return
    placed = plan(inventory, requests, APART)
    taken = [(s.node, gpu) for slots in placed.roles.values() for s in slots for gpu in s.device_ids]
    assert len(taken) == len(set(taken)) == gpus * (tensor + 1)
