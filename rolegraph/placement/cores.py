"""Dividing the cores of the nodes: among the groups that run on CPUs, and among the ranks beside their GPUs."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolegraph.placement.types import Inventory, Node, RoleRequest, Slot
from rolegraph.role import Mesh

Roles = Mapping[str, RoleRequest]
Slots = dict[str, tuple[Slot, ...]]
_TINY = 1e-9


class Cores:
    """The cores of each node that are still free."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.free = {node.name: node.cpus for node in inventory.nodes}

    def take(self, cores: float, unit: float) -> dict[str, float] | None:
        """Cores by node, in blocks of `unit` that never cross a node, or null when there is no room."""
        taken: dict[str, float] = {}
        left = cores
        for node, free in self.free.items():
            blocks = math.floor(min(free, left) / unit + _TINY) if unit else 0
            share = min(blocks * unit, left)
            if share > 0:
                taken[node] = share
                left -= share
        if left >= _TINY:
            return None
        for node, share in taken.items():
            self.free[node] -= share
        return taken


def threads_of(cores: float) -> int:
    """A rank's cores rounded down, at least 1."""
    return max(1, math.floor(cores + _TINY))


def divide(cores: Cores, on_gpus: Slots, groups: Sequence[tuple[str, ...]], by_role: Roles) -> Slots:
    """Slots with their cores, of the roles on GPUs and of all that run on CPUs and have room.

    Groups whose cores are named are served first; the others divide what is left of each node equally. A role on GPUs
    whose named cores a node lacks is left out, as is one on CPUs.
    """
    with_gpus = _by_node(on_gpus, groups)
    lacking = _reserve(cores, with_gpus, by_role)
    on_cpus = [tuple(role for role in group if role not in on_gpus) for group in groups]
    beside, named, derived = _kinds([group for group in on_cpus if group], by_role)
    slots: Slots = {role: _beside(by_role[role], cores.inventory) for group in beside for role in group}
    for group in named:
        largest = max((by_role[role] for role in group), key=lambda request: request.cores)
        unit = (largest.cpus or 0.0) * (largest.tensor if largest.is_spmd else 1)
        if (taken := cores.take(largest.cores, unit)) is not None:
            slots |= {role: _spread(by_role[role], taken) for role in group}
    portions = _portions(cores, with_gpus, len(derived), by_role)
    for group in derived:
        share = {node: portion for node, portion in portions.items() if portion > _TINY}
        if share and sum(share.values()) + _TINY >= max(by_role[role].cores for role in group):
            slots |= {role: _spread(by_role[role], share) for role in group}
    for group in groups:
        here = {role: on_gpus[role] for role in group if role in on_gpus and role not in lacking}
        slots |= _beside_gpus(here, with_gpus, portions, by_role)
    return slots


Ranks = dict[str, dict[tuple[str, ...], Counter[str]]]
"""Node -> group -> role -> its ranks on that node."""


def _by_node(on_gpus: Slots, groups: Sequence[tuple[str, ...]]) -> Ranks:
    found: Ranks = {}
    for group in groups:
        for role in group:
            for slot in on_gpus.get(role, ()):
                found.setdefault(slot.node, {}).setdefault(group, Counter())[role] += 1
    return found


def _named(ranks: Counter[str], by_role: Roles) -> float:
    """Cores that the roles of a group ask for on a node: the most that one of them does, they take turns."""
    return max((by_role[role].cpus or 0.0) * count for role, count in ranks.items())


def _reserve(cores: Cores, with_gpus: Ranks, by_role: Roles) -> set[str]:
    """Take the named cores of roles on GPUs off their nodes; the roles for which a node has too few."""
    lacking: set[str] = set()
    for node, groups in with_gpus.items():
        for group, ranks in groups.items():
            cores.free[node] -= _named(ranks, by_role)
            if cores.free[node] < -_TINY:
                lacking |= {role for role in group if role in by_role and by_role[role].cpus and ranks[role]}
    return lacking


def _portions(cores: Cores, with_gpus: Ranks, derived: int, by_role: Roles) -> dict[str, float]:
    """What each group without named cores gets of each node."""
    portions = {}
    for node, free in cores.free.items():
        unnamed = sum(any(by_role[r].cpus is None for r in ranks) for ranks in with_gpus.get(node, {}).values())
        portions[node] = max(free, 0.0) / max(unnamed + derived, 1)
    return portions


def _beside_gpus(here: Slots, with_gpus: Ranks, portions: Mapping[str, float], by_role: Roles) -> Slots:
    """The slots of one group with their cores; in its turn a role has all the cores of its group on a node."""
    slots: Slots = {}
    for role, found in here.items():
        each: dict[str, float] = {}
        for node in dict.fromkeys(slot.node for slot in found):
            ranks = next(ranks for ranks in with_gpus[node].values() if role in ranks)
            named = _named(ranks, by_role)
            whole = named + (portions[node] if any(by_role[r].cpus is None for r in ranks) else 0.0)
            each[node] = max(by_role[role].cpus or 0.0, whole / ranks[role])
        asked = by_role[role].cpus or 0.0
        slots[role] = tuple(
            replace(s, cores=each[s.node], threads=threads_of(each[s.node]), named_cores=asked) for s in found
        )
    return slots


def _kinds(groups: Sequence[tuple[str, ...]], by_role: Roles) -> tuple[list[tuple[str, ...]], ...]:
    """Groups that take no cores, groups whose cores are named, and the rest."""
    beside: list[tuple[str, ...]] = []
    named: list[tuple[str, ...]] = []
    derived: list[tuple[str, ...]] = []
    for group in groups:
        alone = all(by_role[role].light for role in group)
        cpus = [0.0 if alone and by_role[role].cpus is None else by_role[role].cpus for role in group]
        kind = beside if all(cores == 0 for cores in cpus) else derived if None in cpus else named
        kind.append(group)
    return beside, named, derived


def _beside(request: RoleRequest, inventory: Inventory) -> tuple[Slot, ...]:
    """Slots without cores of their own, over the nodes in turn; their threads may use the whole node."""
    count, nodes, mesh = request.actors, inventory.nodes, request.mesh(request.actors)
    homes = [nodes[rank * len(nodes) // count if count > len(nodes) else rank] for rank in range(count)]
    tenants = Counter(home.name for home in homes)
    return tuple(
        replace(_cpu_slot(request, rank, mesh, home.name, 0.0), threads=threads_of(home.cpus / tenants[home.name]))
        for rank, home in enumerate(homes)
    )


def _spread(request: RoleRequest, cores: Mapping[str, float]) -> tuple[Slot, ...]:
    """Put the ranks on a group's cores, a tensor-parallel group on one node, busier nodes last."""
    if request.cpus == 0:
        return _beside(request, Inventory(tuple(Node(name, cpus=share) for name, share in cores.items())))
    count, mesh = request.actors, request.mesh(request.actors)
    unit = request.tensor if request.is_spmd else 1
    ranks = dict.fromkeys(cores, 0)
    # The node with the most cores a rank first, the earlier one of equals.
    heap = [(-share / unit, at, name) for at, (name, share) in enumerate(cores.items())]
    heapq.heapify(heap)
    for _ in range(count // unit):
        _, at, name = heap[0]
        ranks[name] += unit
        heapq.heapreplace(heap, (-cores[name] / (ranks[name] + unit), at, name))
    slots: list[Slot] = []
    for node, on_node in ranks.items():
        for _ in range(on_node):
            # In its turn a role has the group's cores to itself: the number it names is the least it gets.
            share = max(request.cpus or 0.0, cores[node] / on_node)
            slots.append(_cpu_slot(request, len(slots), mesh, node, share))
    return tuple(slots)


def _cpu_slot(request: RoleRequest, rank: int, mesh: Mesh, node: str, cores: float) -> Slot:
    return Slot(
        role=request.role,
        rank=rank,
        node=node,
        device="cpu",
        device_ids=(),
        cores=cores,
        threads=threads_of(cores),
        mesh=mesh.at(rank),
    )
