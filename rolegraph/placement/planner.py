"""Which rank of which role sits on which device and cores of which node: pure data, decided before anything starts.

The rules:

- A role asks for `ranks` (SPMD roles) or `replicas` (engines), and for `gpus`, its devices in all; either number gives
  the other, given both they must agree. A role with `gpus: 0` needs no device and runs on CPU cores.
- Roles of a colocate group share devices: they ask for equal numbers of GPUs, and the group gets them once. A role of
  the group that names no number takes that of the others.
- `gpus` divides by the model-parallel size, and a tensor-parallel group (or an engine) never crosses a node.
- Without GPUs, `cpus` are the cores a rank, fractions allowed. A colocate group gets the cores of its largest role,
  not the sum: its roles take turns, so each uses all the group's cores divided by its own ranks. Cores that nobody
  names are divided equally among the groups. A role with `cpus: 0` takes none, nor does a light one (reward functions)
  outside a colocate group: they run beside the others.
- A rank's threads are its cores rounded down, at least 1.
- Ranks count tensor-parallel fastest, then context, data, and pipeline slowest: the order of Megatron-core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rolegraph.errors import PlanError
from rolegraph.placement.table import need_and_have, no_room
from rolegraph.placement.types import Device, Inventory, Node, PlacementConfig, Plan, RoleRequest, Slot


@dataclass
class _Pool:
    """What is still free while groups are placed one after the other."""

    inventory: Inventory
    gpus: dict[str, list[int]] = field(init=False)
    cpus: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = {node.name: list(node.gpus) for node in self.inventory.nodes}
        self.cpus = {node.name: node.cpus for node in self.inventory.nodes}

    def take_gpus(self, count: int, unit: int) -> list[tuple[str, int]] | None:
        """`count` devices in blocks of `unit` that never cross a node, or null when there is no room."""
        taken: list[tuple[str, int]] = []
        for node, free in self.gpus.items():
            room = min(len(free) // unit * unit, count - len(taken))
            taken += [(node, free.pop(0)) for _ in range(room)]
        return taken if len(taken) == count else None

    def take_cpus(self, cores: float, unit: float) -> dict[str, float] | None:
        """Cores by node, in blocks of `unit` that never cross a node, or null when there is no room."""
        taken: dict[str, float] = {}
        left = cores
        for node, free in self.cpus.items():
            blocks = math.floor(min(free, left) / unit + 1e-9) if unit else 0
            share = min(blocks * unit, left)
            if share > 0:
                taken[node] = share
                self.cpus[node] -= share
                left -= share
        return taken if left < 1e-9 else None


def plan(inventory: Inventory, requests: Sequence[RoleRequest], placement: PlacementConfig) -> Plan:
    """Place every role; PlanError names what does not fit, with a need/have table and the keys to change."""
    device = _device(inventory, placement)
    by_role = {request.role: request for request in requests}
    groups = _groups(by_role, placement)
    problems = [problem for request in requests for problem in _divisibility(request)]
    for group in groups:
        if device == "cuda":
            members, found = _agree_on_gpus([by_role[role] for role in group])
            by_role.update({member.role: member for member in members})
            problems += found
        else:
            problems += [_no_gpu(by_role[role]) for role in group if by_role[role].gpus]
    if problems:
        raise PlanError("\n".join([*problems, *need_and_have(inventory, by_role, groups, device)]))
    roles: dict[str, tuple[Slot, ...]] = {}
    pool = _Pool(inventory)
    if device == "cuda":
        for group in groups:
            roles.update(_place_on_gpus(pool, [by_role[role] for role in group if by_role[role].uses_gpu]))
    on_cpu = [tuple(role for role in group if device == "cpu" or not by_role[role].uses_gpu) for group in groups]
    roles.update(_place_on_cpus(pool, [group for group in on_cpu if group], by_role))
    if missing := [role for role in by_role if role not in roles]:
        raise PlanError(no_room(missing, inventory, by_role, groups, device))
    if device == "cuda":
        roles = _share_cores(roles, by_role, groups, inventory)
    return Plan({role: roles[role] for role in by_role}, groups, device)


def _device(inventory: Inventory, placement: PlacementConfig) -> Device:
    if placement.device == "gpu" and not inventory.gpus:
        names = ", ".join(node.name for node in inventory.nodes)
        raise PlanError(f"placement.device=gpu, and no GPU is on {names}: set placement.device=cpu, or auto")
    return "cuda" if inventory.gpus and placement.device != "cpu" else "cpu"


def _groups(by_role: Mapping[str, RoleRequest], placement: PlacementConfig) -> tuple[tuple[str, ...], ...]:
    shared = [tuple(dict.fromkeys(group)) for group in placement.colocate_groups]
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


def _place_on_gpus(pool: _Pool, group: Sequence[RoleRequest]) -> dict[str, tuple[Slot, ...]]:
    """One group's slots; empty when there is no room. Cores are filled in once every rank has its node."""
    if not group:
        return {}
    unit = math.lcm(*(request.tensor if request.is_spmd else request.model_parallel for request in group))
    taken = pool.take_gpus(group[0].devices, unit)
    if taken is None:
        return {}
    slots: dict[str, tuple[Slot, ...]] = {}
    for request in group:
        count = request.actors
        per_rank = len(taken) // count
        parts = [taken[rank * per_rank : (rank + 1) * per_rank] for rank in range(count)]
        slots[request.role] = tuple(
            Slot(
                role=request.role,
                rank=rank,
                node=part[0][0],
                device="cuda",
                device_ids=tuple(gpu for _, gpu in part),
                cores=1.0,
                threads=1,
                mesh=request.mesh(count).at(rank),
            )
            for rank, part in enumerate(parts)
        )
    return slots


def _place_on_cpus(
    pool: _Pool, groups: Sequence[tuple[str, ...]], by_role: Mapping[str, RoleRequest]
) -> dict[str, tuple[Slot, ...]]:
    """The slots of all groups that have room; groups with named cores are served first, the rest share what is left."""
    slots: dict[str, tuple[Slot, ...]] = {}
    named: list[tuple[str, ...]] = []
    derived: list[tuple[str, ...]] = []
    for group in groups:
        requests = [by_role[role] for role in group]
        alone = all(request.light for request in requests)
        cpus = [0.0 if alone and request.cpus is None else request.cpus for request in requests]
        if all(cores == 0 for cores in cpus):
            for role in group:
                slots[role] = _beside(by_role[role], pool.inventory)
        elif any(cores is None for cores in cpus):
            derived.append(group)
        else:
            named.append(group)
    for group in named:
        largest = max((by_role[role] for role in group), key=lambda request: request.cores)
        unit = (largest.cpus or 0.0) * (largest.tensor if largest.is_spmd else 1)
        taken = pool.take_cpus(largest.cores, unit)
        for role in group if taken else ():
            slots[role] = _spread(by_role[role], taken or {})
    free = dict(pool.cpus)
    for group in derived:
        share = {node: cores / len(derived) for node, cores in free.items() if cores > 1e-9}
        if share and sum(share.values()) + 1e-9 >= max(by_role[role].cores for role in group):
            for role in group:
                slots[role] = _spread(by_role[role], share)
    return slots


def _beside(request: RoleRequest, inventory: Inventory) -> tuple[Slot, ...]:
    """Slots without cores of their own, over the nodes in turn; their threads may use the whole node."""
    count, nodes = request.actors, inventory.nodes
    homes = [nodes[rank * len(nodes) // count if count > len(nodes) else rank] for rank in range(count)]
    return tuple(
        replace(
            _cpu_slot(request, rank, count, home.name, 0.0),
            threads=max(1, math.floor(home.cpus / homes.count(home) + 1e-9)),
        )
        for rank, home in enumerate(homes)
    )


def _spread(request: RoleRequest, cores: Mapping[str, float]) -> tuple[Slot, ...]:
    """Put the ranks on a group's cores, a tensor-parallel group on one node, busier nodes last."""
    if request.cpus == 0:
        return _beside(request, Inventory(tuple(Node(name, cpus=share) for name, share in cores.items())))
    count = request.actors
    unit = request.tensor if request.is_spmd else 1
    ranks = dict.fromkeys(cores, 0)
    for _ in range(count // unit):
        node = max(cores, key=lambda name: cores[name] / (ranks[name] + unit))
        ranks[node] += unit
    slots: list[Slot] = []
    for node, on_node in ranks.items():
        for _ in range(on_node):
            # In its turn a role has the group's cores to itself: the number it names is the least it gets.
            share = max(request.cpus or 0.0, cores[node] / on_node)
            slots.append(_cpu_slot(request, len(slots), count, node, share))
    return tuple(slots)


def _cpu_slot(request: RoleRequest, rank: int, count: int, node: str, cores: float) -> Slot:
    return Slot(
        role=request.role,
        rank=rank,
        node=node,
        device="cpu",
        device_ids=(),
        cores=cores,
        threads=max(1, math.floor(cores + 1e-9)),
        mesh=request.mesh(count).at(rank),
    )


def _share_cores(
    roles: dict[str, tuple[Slot, ...]],
    by_role: Mapping[str, RoleRequest],
    groups: Sequence[tuple[str, ...]],
    inventory: Inventory,
) -> dict[str, tuple[Slot, ...]]:
    """Divide each node's cores over its device-holding groups; within a group, over the ranks of one role at a time."""
    cores = {node.name: node.cpus for node in inventory.nodes}
    tenants = {
        name: [group for group in groups if any(s.device == "cuda" and s.node == name for r in group for s in roles[r])]
        for name in cores
    }
    shared: dict[str, tuple[Slot, ...]] = {}
    for role, slots in roles.items():
        done = []
        for slot in slots:
            if slot.device == "cuda":
                peers = sum(other.node == slot.node for other in slots)
                share = by_role[role].cpus or cores[slot.node] / len(tenants[slot.node]) / peers
                slot = replace(slot, cores=share, threads=max(1, math.floor(share + 1e-9)))
            done.append(slot)
        shared[role] = tuple(done)
    return shared
