"""What a plan asks for, reserved in Ray: one placement group for the whole run, so that it gets all or nothing.

Two runs that reserved role by role could each hold half of what both need, and wait for each other.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rolegraph.errors import PlanError, RoleGraphError
from rolegraph.nodes import RayNode, amounts, find_node, free_resources, holders, is_address, ray_nodes
from rolegraph.placement import Plan, Slot

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class Seat:
    """Where one actor is scheduled: Ray's side of a `Slot`."""

    options: dict[str, Any]
    device_ids: tuple[str, ...] = ()
    """Physical devices that the bundles really got, as CUDA_VISIBLE_DEVICES names them: numbers, or GPU-... and MIG-...
    ids."""


@dataclass
class Bundles:
    """The bundles of a plan, and who sits in which."""

    resources: list[dict[str, float]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """The plan's node of each bundle."""
    groups: list[int] = field(default_factory=list)
    """The index of each bundle's group in the plan."""
    gpu_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """Bundle of a planned device of a node."""
    cpu_of: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bundle of the cores that a role's group has on a node."""
    share: dict[tuple[str, str], float] = field(default_factory=dict)
    """CPUs of each actor of a role on a node: the group's cores, split over all its actors there."""

    def add(self, group: int, node: str, resources: dict[str, float]) -> int:
        """One more bundle; returns its index."""
        self.resources.append(resources)
        self.nodes.append(node)
        self.groups.append(group)
        return len(self.resources) - 1


def bundles_of(plan: Plan) -> Bundles:
    """A bundle a device, and one a group and node for the cores; colocated roles take turns, so the largest counts.

    Cores that roles on GPUs ask for are a bundle as well, in which nobody sits: other runs keep off them.
    """
    found = Bundles()
    for number, group in enumerate(plan.groups):
        by_node: dict[str, list[Slot]] = {}
        for slot in (slot for role in group for slot in plan.roles[role]):
            by_node.setdefault(slot.node, []).append(slot)
        for node, here in by_node.items():
            for device in sorted({device for slot in here for device in slot.device_ids}):
                found.gpu_of[node, device] = found.add(number, node, {"GPU": 1.0})
            if beside := _cores(max(sum(s.named_cores for s in here if s.role == role) for role in group)):
                found.add(number, node, {"CPU": beside})
            on_cpu = [slot for slot in here if slot.device == "cpu" and slot.cores > 0]
            if cores := _cores(max(sum(s.cores for s in on_cpu if s.role == role) for role in group)):
                index = found.add(number, node, {"CPU": cores})
                share = math.floor(cores / len(on_cpu) * 1e4) / 1e4
                for role in group:
                    found.cpu_of[node, role], found.share[node, role] = index, share
    return found


def _cores(amount: float) -> float:
    """As Ray counts them, in units of 1e-4."""
    return math.floor(amount * 1e4 + 1e-6) / 1e4


def order_devices(planned: Mapping[str, Sequence[int]], got: Mapping[str, Sequence[str]]) -> dict[tuple[str, int], str]:
    """Which physical device stands for which planned one: on each node both in their order.

    Ray hands out the devices of a node in any order, so the first bundle may hold the last device; ranks that follow
    each other in the plan sit on devices that follow each other on the node.
    """
    found = {}
    for node, devices in planned.items():
        physical = sorted(got[node], key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        found.update({(node, device): name for device, name in zip(sorted(devices), physical, strict=True)})
    return found


class Reservation:
    """The placement group of a plan, and the nodes it is on."""

    def __init__(self, plan: Plan, name: str = "rolegraph") -> None:
        self.plan = plan
        self.name = name
        self.bundles = bundles_of(plan)
        self.nodes: dict[str, RayNode] = {}
        """The plan's nodes as the cluster knows them."""
        self._group: PlacementGroup | None = None
        self._physical: dict[tuple[str, int], str] = {}

    async def take(self, timeout_s: float) -> None:
        """Reserve everything, within `timeout_s` seconds; PlanError shows need and have, and who has the rest."""
        from ray.util.placement_group import placement_group

        self._find_nodes()
        if not self.bundles.resources:
            return
        known = all(node in self.nodes for node in self.bundles.nodes)
        self._group = placement_group(
            self.bundles.resources,
            # A plan of one node that it does not name by its address: on any one node.
            strategy="PACK" if known else "STRICT_PACK",
            name=f"{self.name}/{' | '.join('+'.join(group) for group in self.plan.groups)} {uuid.uuid4().hex[:4]}",
            bundle_label_selector=[self.nodes[node].selector for node in self.bundles.nodes] if known else None,
        )
        deadline = time.monotonic() + timeout_s
        while not self._group.wait(timeout_seconds=0.05):
            self.raise_for_lost_nodes()
            if time.monotonic() > deadline:
                message = self._shortage(timeout_s)
                self.release()
                raise PlanError(message)
            await asyncio.sleep(0.05)
        self._note_nodes()
        try:
            await asyncio.wait_for(self._probe(), timeout_s)
        except TimeoutError:
            self.raise_for_lost_nodes()
            self.release()
            raise PlanError(
                f"the reserved devices did not say which they are within placement.timeout_s={timeout_s:g} seconds: "
                "workers cannot start on their nodes (see Ray's logs there), or raise the time"
            ) from None

    def seat(self, slot: Slot) -> Seat:
        """How Ray schedules the actor of `slot`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        if slot.device == "cuda":
            index, cpus = self.bundles.gpu_of[slot.node, slot.device_ids[0]], 0.0
        elif slot.cores > 0:
            index, cpus = self.bundles.cpu_of[slot.node, slot.role], self.bundles.share[slot.node, slot.role]
        elif (node := self.nodes.get(slot.node)) is not None:
            return Seat({"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)})
        else:
            return Seat({"num_cpus": 0})
        strategy = PlacementGroupSchedulingStrategy(self._group, index, placement_group_capture_child_tasks=False)
        ids = tuple(self._physical[slot.node, device] for device in slot.device_ids)
        return Seat({"num_cpus": cpus, "num_gpus": 0, "scheduling_strategy": strategy}, ids)

    def release(self) -> None:
        """Give everything back."""
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def node_name(self, node_id: str, address: str) -> str:
        """What the plan's messages call the node with this id."""
        return next((node.name for node in self.nodes.values() if node.id == node_id), address)

    def lost(self) -> dict[str, RayNode]:
        """The plan's nodes that have left the cluster, by the plan's names."""
        import ray

        alive = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        return {name: node for name, node in self.nodes.items() if node.id not in alive}

    def lost_message(self, at: str | None = None) -> str | None:
        """Which nodes left and who was on them; null when all are there, or when the node `at` is."""
        parts, lost = [], self.lost()
        if at is not None and at not in (*lost, *(node.name for node in lost.values())):
            return None
        for name, node in lost.items():
            ranks = {role: [s.rank for s in slots if s.node == name] for role, slots in self.plan.roles.items()}
            there = ", ".join(f"{role} {_ranks(found)}" for role, found in ranks.items() if found)
            parts.append(f"node {node.name} left the cluster, and with it {there}")
        return "; ".join(parts) or None

    def raise_for_lost_nodes(self) -> None:
        """RoleGraphError when a node of the plan has left."""
        if (message := self.lost_message()) is not None:
            self.release()
            raise RoleGraphError(f"{message}. Start again on the nodes that are left, or bring it back")

    def _find_nodes(self) -> None:
        """Match the plan's nodes to the cluster's; a plan of one node may call it what it likes, but for an address."""
        cluster = ray_nodes()
        planned = list(dict.fromkeys(slot.node for slots in self.plan.roles.values() for slot in slots))
        self.nodes = {name: node for name in planned if (node := find_node(name, cluster)) is not None}
        if unknown := [name for name in planned if name not in self.nodes]:
            if len(planned) > 1 or is_address(unknown[0]):
                raise PlanError(
                    f"the plan names nodes that are not in the cluster: {', '.join(unknown)}. The cluster has "
                    f"{', '.join(node.name for node in cluster)}: plan for those"
                )
            if len(cluster) == 1:
                self.nodes = {unknown[0]: cluster[0]}

    def _note_nodes(self) -> None:
        """Learn which node Ray chose where the plan named none."""
        from ray.util.placement_group import placement_group_table

        if self.nodes:
            return
        chosen = placement_group_table(self._group)["bundles_to_node_id"][0]
        self.nodes = {self.bundles.nodes[0]: next(node for node in ray_nodes() if node.id == chosen)}

    async def _probe(self) -> None:
        """Ask each bundle which physical device it got."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def gpu_id() -> str:
            return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

        planned: dict[str, list[int]] = {}
        got: dict[str, list[Any]] = {}
        for (node, device), index in self.bundles.gpu_of.items():
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            task = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=strategy)(gpu_id)
            planned.setdefault(node, []).append(device)
            got.setdefault(node, []).append(task.remote())
        answers = {node: [await ref for ref in refs] for node, refs in got.items()}
        self._physical = order_devices(planned, answers)

    def _shortage(self, timeout_s: float) -> str:
        nodes = ray_nodes()
        lines = [
            f"the cluster did not give the devices within placement.timeout_s={timeout_s:g} seconds: something else "
            "holds them. Ask for less, wait for it to end, or raise the time",
            "  need",
        ]
        for number, group in enumerate(self.plan.groups):
            needs = [f"{amounts(need)} on {node}" for node, need in self._need(number).items()]
            lines.append(f"    {' + '.join(group):<30}{'; '.join(needs) or 'nothing of its own'}")
        lines.append(f"  {'have':<32}{'free now':<20}in all")
        free = free_resources()
        for node in nodes:
            lines.append(f"    {node.name:<30}{amounts(free.get(node.id, {})):<20}{amounts(node.resources)}")
        ours = self._group.id.hex() if self._group is not None else ""
        if held := holders(but=ours):
            lines += ["  held by", *(f"    {holder.line()}" for holder in held)]
        return "\n".join(lines)

    def _need(self, group: int) -> dict[str, dict[str, float]]:
        """What a group asks of each node."""
        need: dict[str, dict[str, float]] = {}
        for number, node, resources in zip(
            self.bundles.groups, self.bundles.nodes, self.bundles.resources, strict=True
        ):
            for kind, amount in resources.items() if number == group else ():
                total = need.setdefault(node, {})
                total[kind] = total.get(kind, 0.0) + amount
        return need


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0, 2, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = list(range(ranks[0], ranks[-1] + 1)) == list(ranks)
    return f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"
