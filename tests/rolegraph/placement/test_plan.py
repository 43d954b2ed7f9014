"""Placement rules, on made-up machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.errors import PlanError
from rolegraph.placement import Inventory, Node, PlacementConfig, Plan, RoleRequest, plan
from rolegraph.placement.clusters import cluster

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
    expected = r"`rollout`: an engine of 4 GPUs stays on one node.*largest has 3: lower rollout\.tensor_parallel_size"
    with pytest.raises(PlanError, match=expected):
        plan(PAIR, [rollout(gpus=4, tensor=4)], APART)
    expected = r"`train`: a tensor-parallel group of 4 GPUs .* lower train\.tensor_model_parallel_size \(4\)"
    with pytest.raises(PlanError, match=expected):
        plan(PAIR, [train(gpus=4, tensor=4)], APART)
    cpus = Inventory((Node("a", cpus=3), Node("b", cpus=3)))
    placed = plan(cpus, [train(4, tensor=2)], APART)
    assert [slot.node for slot in placed.roles["train"]] == ["a", "a", "b", "b"]


def test_what_is_left_of_the_nodes_may_not_hold_a_block() -> None:
    with pytest.raises(PlanError) as caught:
        plan(PAIR, [rollout(gpus=6, tensor=2)], APART)
    message = str(caught.value)
    assert "no room for `rollout`: there are 6 GPUs, but what is left on each node does not hold the blocks" in message
    assert "(2 for `rollout`). Lower rollout.tensor_parallel_size, or rollout.gpus or rollout.replicas" in message


def test_large_blocks_go_first_where_the_order_of_the_config_leaves_no_room() -> None:
    nodes = Inventory((Node("a", gpus=(0, 1, 2, 3), cpus=8), Node("b", gpus=(0, 1, 2), cpus=8)))
    placed = plan(nodes, [train(gpus=3), rollout(gpus=2, tensor=2)], APART)
    assert devices(placed, "train") == [("a", (0,)), ("a", (1,)), ("a", (2,))]
    placed = plan(nodes, [train(gpus=3), rollout(gpus=4, tensor=4)], APART)
    assert devices(placed, "rollout") == [("a", (0, 1, 2, 3))]
    assert devices(placed, "train") == [("b", (0,)), ("b", (1,)), ("b", (2,))]
    assert list(placed.roles) == ["train", "rollout"]


def test_too_few_gpus_says_how_many_are_there() -> None:
    with pytest.raises(PlanError) as caught:
        plan(PAIR, [train(gpus=4), rollout(gpus=3)], APART)
    message = str(caught.value)
    assert (
        "no room for `rollout`: 7 GPUs are asked for, and there are 6. Lower rollout.gpus or rollout.replicas"
        in message
    )
    assert ["train", "4", "(4", "ranks)"] in [line.split() for line in message.splitlines()]
    assert ["b", "3"] in [line.split() for line in message.splitlines()]


def test_many_nodes_are_counted_not_listed() -> None:
    nodes = Inventory(tuple(Node(f"n{i}", gpus=tuple(range(8)), cpus=8) for i in range(40)))
    with pytest.raises(PlanError, match=r"n0 to n39 +40 x 8"):
        plan(nodes, [train(gpus=400)], APART)


def test_cores_beside_gpus_are_counted_by_node() -> None:
    with pytest.raises(PlanError) as caught:
        plan(PAIR, [train(gpus=4, cpus=3)], APART)
    message = str(caught.value)
    assert "no room for `train`: the cores beside the GPUs of a node do not suffice. Lower train.cpus" in message
    assert ["train", "12", "(4", "ranks)"] in [line.split() for line in message.splitlines()]
    placed = plan(PAIR, [train(gpus=4, cpus=2), rollout(gpus=2)], APART)
    assert [slot.cores for slot in placed.roles["train"]] == [2.0] * 4
    assert [slot.cores for slot in placed.roles["rollout"]] == [3.0, 3.0]


def test_a_role_on_cores_beside_roles_on_gpus_takes_its_part_of_each_node() -> None:
    placed = plan(BOX, [train(gpus=2), RoleRequest("prm", gpus=0, is_spmd=False)], APART)
    assert [slot.cores for slot in placed.roles["train"]] == [4.0, 4.0]
    assert [(slot.device, slot.cores) for slot in placed.roles["prm"]] == [("cpu", 8.0)]
    placed = plan(BOX, [train(gpus=2), RoleRequest("prm", 2, gpus=0, cpus=6, is_spmd=False)], APART)
    assert [slot.cores for slot in placed.roles["train"]] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1 / 2),
        ({"sleep_level": 1}, 1 / 2),
        ({"offload_model": True, "offload_optimizer": True}, 1 / 2),
        ({"offload_model": True, "sleep_level": 2}, 1 / 2),
        ({"offload_model": True, "offload_optimizer": True, "sleep_level": 1}, 1.0),
    ],
)
def test_a_share_follows_from_who_stays_on_the_device(options: dict[str, object], share: float) -> None:
    placement = PlacementConfig(colocate_groups=(("train", "rollout", "orm"),))
    for name, value in options.items():
        object.__setattr__(placement, name, value)
    placed = plan(BOX, [train(gpus=4), rollout(), ORM], placement)
    assert {slot.share for role in ("train", "rollout") for slot in placed.roles[role]} == {share}
    assert plan(BOX, [train(gpus=2), rollout(gpus=2)], APART).roles["train"][0].share == 1.0


def test_three_roles_of_which_one_stays() -> None:
    placement = PlacementConfig(colocate_groups=(("train", "rollout", "teacher"),))
    requests = [train(gpus=4), rollout(), RoleRequest("teacher", is_spmd=False)]
    assert plan(BOX, requests, placement).roles["teacher"][0].share == pytest.approx(1 / 3)
    placement = replace(placement, offload_teacher_model=True)
    assert plan(BOX, requests, placement).roles["teacher"][0].share == pytest.approx(1 / 3)
    placement = replace(placement, sleep_level=1)
    assert plan(BOX, requests, placement).roles["train"][0].share == pytest.approx(1 / 2)


def test_teachers_of_any_name_step_aside_and_have_their_turn_together() -> None:
    both = ("teacher", "teacher_math")
    placement = PlacementConfig(colocate_groups=(("rollout", *both),), sleep_level=1)
    requests = [rollout(gpus=4), *(RoleRequest(role, is_spmd=False) for role in both)]
    assert plan(BOX, requests, placement).roles["rollout"][0].share == pytest.approx(1 / 3)
    placement = replace(placement, offload_teacher_model=True)
    assert plan(BOX, requests, placement).roles["rollout"][0].share == pytest.approx(1 / 2)
    one = replace(placement, colocate_groups=(("rollout", "teacher_math"),))
    assert plan(BOX, [requests[0], requests[2]], one).roles["rollout"][0].share == 1.0


def test_groups_that_contradict_themselves() -> None:
    with pytest.raises(PlanError, match="names role `train`, which is in group 0 already"):
        plan(BOX, [train(), rollout()], PlacementConfig(colocate_groups=(("train", "rollout"), ("train", "rollout"))))
    with pytest.raises(PlanError, match="names fewer than two roles"):
        plan(BOX, [train(), rollout()], PlacementConfig(colocate_groups=(("train", "train"),)))


def test_an_engine_that_is_data_parallel_inside_counts_all_its_devices() -> None:
    placed = plan(BOX, [RoleRequest("sampler", is_spmd=False, gpus=4, tensor=2, data=2)], APART)
    assert devices(placed, "sampler") == [("box", (0, 1, 2, 3))]
    with pytest.raises(PlanError, match=r"sampler\.gpus=2 does not divide by the model-parallel size 4"):
        plan(BOX, [RoleRequest("sampler", is_spmd=False, gpus=2, tensor=2, data=2)], APART)


def test_a_layout_of_32_gpus_with_a_teacher() -> None:
    requests = [
        train(gpus=16, tensor=4, pipeline=2),
        rollout(gpus=8, tensor=2),
        RoleRequest("teacher", gpus=8, tensor=4, is_spmd=False),
        ORM,
    ]
    placed = plan(cluster("4x8xH100-80G"), requests, APART)
    assert devices(placed, "train") == [(f"node-{rank // 8}", (rank % 8,)) for rank in range(16)]
    assert devices(placed, "rollout") == [("node-2", (first, first + 1)) for first in (0, 2, 4, 6)]
    assert devices(placed, "teacher") == [("node-3", (0, 1, 2, 3)), ("node-3", (4, 5, 6, 7))]
    # The ranks of a tensor-parallel group follow each other; stages are whole nodes.
    assert {slot.mesh.pp_rank for slot in placed.roles["train"] if slot.node == "node-1"} == {1}
    assert {slot.share for slots in placed.roles.values() for slot in slots} == {1.0}
    with pytest.raises(PlanError, match=r"no room for `teacher`: 32 GPUs are asked for, and there are 24"):
        plan(cluster("3x8xH100-80G"), requests, APART)


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
