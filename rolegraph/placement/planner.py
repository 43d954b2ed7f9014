"""Which rank of which role sits on which device and cores of which node: pure data, decided before anything starts.

The rules:

- A role asks for `ranks` (SPMD roles) or `replicas` (engines), and for `gpus`, its devices in all; either number gives
  the other, given both they must agree. A role with `gpus: 0` needs no device and runs on CPU cores.
- Roles of a colocate group share devices: they ask for equal numbers of GPUs, and the group gets them once. A role of
  the group that names no number takes that of the others.
- Device groups name devices and who shares them; see `rolegraph.placement.device_groups`.
- `gpus` divides by the model-parallel size, and a tensor-parallel group (or an engine) never crosses a node.
- A role's ranks fill one node after the other, in the order of the nodes. Groups are placed in the order of the config;
  where that leaves too little room on one node, those with the largest blocks first.
- `cpus` are the cores a rank, fractions allowed. A colocate group gets the cores of its largest role, not the sum: its
  roles take turns, so each uses all the group's cores divided by its own ranks. Cores that nobody names are divided
  equally among the groups of a node. A role with `cpus: 0` takes none, nor does a light one (reward functions) outside
  a colocate group: they run beside the others.
- A rank's threads are its cores rounded down, at least 1.
- Ranks count tensor-parallel fastest, then context, data, and pipeline slowest: the order of Megatron-core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolegraph.errors import PlanError
from rolegraph.placement.cores import Cores, Slots, divide
from rolegraph.placement.seating import Devices, Seating, seat
from rolegraph.placement.shares import share_of
from rolegraph.placement.table import need_and_have, no_cores, no_gpus
from rolegraph.placement.types import Device, Inventory, PlacementConfig, Plan, RoleRequest, Slot


def plan(inventory: Inventory, requests: Sequence[RoleRequest], placement: PlacementConfig) -> Plan:
    """Place every role; PlanError names what does not fit, with a need/have table and the keys to change."""
    seating = _seating(inventory, requests, placement)
    by_role, groups, device = dict(seating.requests), seating.groups, seating.device
    problems = list(seating.problems) or [problem for request in by_role.values() for problem in _divisibility(request)]
    for group in groups:
        if device == "cuda":
            members, found = _agree_on_gpus([by_role[role] for role in group])
            by_role.update({member.role: member for member in members})
            problems += found
        else:
            problems += [_no_gpu(by_role[role]) for role in group if by_role[role].gpus]
    if problems:
        table = need_and_have(inventory, by_role, groups, "GPUs" if device == "cuda" else "cores")
        raise PlanError("\n".join([*dict.fromkeys(problems), *table]))
    on_gpus: Slots = {}
    if device == "cuda":
        users = [[by_role[role] for role in group if by_role[role].uses_gpu] for group in groups]
        on_gpus = _place_on_gpus(inventory, [group for group in users if group], placement, seating.devices)
        if missing := [role for role in by_role if by_role[role].uses_gpu and role not in on_gpus]:
            raise PlanError(no_gpus(missing, inventory, by_role, groups))
    roles = divide(Cores(inventory), on_gpus, groups, by_role)
    if missing := [role for role in by_role if role not in roles]:
        shareable = device == "cpu" and placement.device_groups is None
        raise PlanError(no_cores(missing, inventory, by_role, groups, shareable=shareable))
    return Plan({role: roles[role] for role in by_role}, groups, device)


def _seating(inventory: Inventory, requests: Sequence[RoleRequest], placement: PlacementConfig) -> Seating:
    """Who shares devices with whom, in whichever notation; which devices, only where they are named."""
    if problems := list(placement.problems()):
        raise PlanError("\n".join(problems))
    if (named := placement.named_devices) is not None:
        return seat(named, inventory, requests)
    by_role = {request.role: request for request in requests}
    return Seating(by_role, _groups(by_role, placement), {}, _device(inventory, placement))


def _device(inventory: Inventory, placement: PlacementConfig) -> Device:
    if placement.device == "gpu" and not inventory.gpus:
        names = ", ".join(node.name for node in inventory.nodes)
        raise PlanError(f"placement.device=gpu, and no GPU is on {names}: set placement.device=cpu, or auto")
    return "cuda" if inventory.gpus and placement.device != "cpu" else "cpu"


def _groups(by_role: Mapping[str, RoleRequest], placement: PlacementConfig) -> tuple[tuple[str, ...], ...]:
    shared = [tuple(dict.fromkeys(group)) for group in placement.colocated]
    for group in shared:
        if unknown := [role for role in group if role not in by_role]:
            raise PlanError(
                f"placement.colocate_groups names {', '.join(f'`{role}`' for role in unknown)}, which takes no part "
                f"in this run; its roles are {', '.join(by_role)}. Set placement=separate, or list those"
            )
    named = {role for group in shared for role in group}
    return (*shared, *((role,) for role in by_role if role not in named))


def _divisibility(request: RoleRequest) -> list[str]:
    """Numbers of one role that contradict each other."""
    size, gpus, count = request.model_parallel, request.gpus, request.count
    problems = []
    sizes = f"{size} (tensor {request.tensor} x context {request.context} x pipeline {request.pipeline})"
    if gpus and gpus % size:
        problems.append(f"{request.role}.gpus={gpus} does not divide by the model-parallel size {sizes}")
    if request.is_spmd and count and count % size:
        problems.append(f"{request.key}={count} does not divide by the model-parallel size {sizes}")
    per_rank = 1 if request.is_spmd else size
    if gpus and count and gpus != count * per_rank:
        problems.append(
            f"{request.key}={count} needs {count * per_rank} GPUs, and {request.role}.gpus={gpus}: give one of the two"
        )
    world = count or gpus or size
    if request.is_spmd and not world % size and request.expert > 1:
        dp = world // request.pipeline
        if dp % request.expert:
            problems.append(
                f"{request.role}.expert_model_parallel_size={request.expert} does not divide the {dp} ranks of a "
                f"pipeline stage"
            )
    return problems


def _no_gpu(request: RoleRequest) -> str:
    return (
        f"{request.role}.gpus={request.gpus}, and this run has no GPU: leave it out and set {request.key} "
        f"(and {request.role}.cpus, the cores of each) instead"
    )


def _agree_on_gpus(group: Sequence[RoleRequest]) -> tuple[list[RoleRequest], list[str]]:
    """Give the group's silent roles the number of the others; a problem when the numbers differ."""
    users = [request for request in group if request.uses_gpu]
    named = [request.devices for request in users if request.gpus or request.count]
    wanted = max(named or [request.devices for request in users], default=0)
    filled = [
        request if request.gpus == 0 or request.count else replace(request, gpus=request.gpus or wanted)
        for request in group
    ]
    sizes = {request.role: request.devices for request in filled if request.uses_gpu}
    if len(set(sizes.values())) <= 1:
        return filled, [problem for request in filled for problem in _divisibility(request)]
    asked = ", ".join(f"{role}.gpus={size}" for role, size in sizes.items())
    return filled, [f"roles that share devices ask for equal numbers of GPUs, and these differ: {asked}"]


def _place_on_gpus(
    inventory: Inventory,
    groups: Sequence[Sequence[RoleRequest]],
    placement: PlacementConfig,
    named: Mapping[str, Devices],
) -> Slots:
    """The slots of every group that has room, without their cores; `named` are the devices of roles that have some."""
    if named:
        return {
            role: slots
            for group in groups
            for role, slots in _on_devices(group, named[group[0].role], placement).items()
        }
    blocks = [math.lcm(*(request.block for request in group)) for group in groups]
    in_order = list(range(len(groups)))
    tried: list[dict[int, list[tuple[str, int]]]] = []
    # Small groups in front can leave no node with room for a large block behind them.
    for order in (in_order, sorted(in_order, key=lambda at: -blocks[at])):
        free = {node.name: node.gpus for node in inventory.nodes}
        taken = {at: _take(free, groups[at][0].devices, blocks[at]) for at in order}
        tried.append({at: devices for at, devices in taken.items() if devices is not None})
    # Where neither has room for all, the order of the config says who is left out.
    best = next((found for found in tried if len(found) == len(groups)), tried[0])
    return {
        role: slots
        for at, devices in best.items()
        for role, slots in _on_devices(groups[at], devices, placement).items()
    }


def _take(free: dict[str, tuple[int, ...]], count: int, block: int) -> list[tuple[str, int]] | None:
    """`count` devices in blocks that never cross a node, off those that are free; null when there is no room."""
    taken: list[tuple[str, int]] = []
    left: dict[str, tuple[int, ...]] = {}
    for node, devices in free.items():
        room = min(len(devices) // block * block, count - len(taken))
        if room:
            taken += [(node, device) for device in devices[:room]]
            left[node] = devices[room:]
        if len(taken) == count:
            free.update(left)
            return taken
    return None


def _on_devices(group: Sequence[RoleRequest], taken: Sequence[tuple[str, int]], placement: PlacementConfig) -> Slots:
    """The slots of the roles of one group, each role over all its devices in their order."""
    share = share_of([request.role for request in group], placement)
    slots: Slots = {}
    for request in group:
        count, mesh = request.actors, request.mesh(request.actors)
        per_rank = len(taken) // count
        parts = [taken[rank * per_rank : (rank + 1) * per_rank] for rank in range(count)]
        slots[request.role] = tuple(
            Slot(
                role=request.role,
                rank=rank,
                node=part[0][0],
                device="cuda",
                device_ids=tuple(gpu for _, gpu in part),
                cores=0.0,
                threads=1,
                mesh=mesh.at(rank),
                share=share,
            )
            for rank, part in enumerate(parts)
        )
    return slots
