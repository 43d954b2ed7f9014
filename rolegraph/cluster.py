"""Ray itself: join a cluster that runs, or start one on this machine; reserve what a plan asks for."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.errors import PlanError
from rolegraph.placement import Inventory, Node, Plan, Slot

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_ENV = {
    # Which GPUs a process sees is set from the plan; Ray would hide them all from actors that reserve none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Cluster:
    """A connection to Ray; `stop` ends it, and Ray with it when `connect` started that."""

    def __init__(self, *, is_ours: bool, is_joined: bool = False) -> None:
        self.is_ours = is_ours
        self.is_joined = is_joined
        """Whether the cluster was there before, and may be more than this machine."""

    @classmethod
    def connect(cls, cpus: float, *, object_store_bytes: int | None = None) -> Cluster:
        """Use the Ray this process is connected to, else join one, else start one with `cpus` logical CPUs.

        Joined are the cluster of RAY_ADDRESS, and one that `ray start` left running on this machine.
        """
        import ray

        if ray.is_initialized():
            return cls(is_ours=False, is_joined=True)
        for name, value in _ENV.items():
            os.environ.setdefault(name, value)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if _running_cluster():
            try:
                ray.init(**quiet)
                # Leaving a joined cluster ends our connection, not the cluster.
                return cls(is_ours=True, is_joined=True)
            except ConnectionError:
                if os.environ.get("RAY_ADDRESS"):
                    raise
        # One more than the plan needs: tasks that read data must not wait for roles to end.
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)) + 1,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            **quiet,
        )
        return cls(is_ours=True)

    def stop(self) -> None:
        """Disconnect, unless the program was connected before; a Ray that we started ends, a joined one stays."""
        import ray

        if self.is_ours and ray.is_initialized():
            ray.shutdown()


def _running_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS")) or Path("/tmp/ray/ray_current_cluster").exists()


def cluster_inventory() -> Inventory:
    """The nodes of the connected cluster, by IP address."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return Inventory(
        tuple(
            Node(
                node["NodeManagerAddress"],
                tuple(range(int(node["Resources"].get("GPU", 0)))),
                float(node["Resources"].get("CPU", 0)),
            )
            for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))
        )
    )


@dataclass(frozen=True)
class Seat:
    """Where one actor is scheduled: Ray's side of a `Slot`."""

    options: dict[str, Any]
    device_ids: tuple[int, ...] = ()
    """Physical devices that the bundle really got."""


@dataclass
class _Bundles:
    """The bundles of one colocate group, and who sits in which."""

    resources: list[dict[str, float]] = field(default_factory=list)
    cpu_of: dict[str, int] = field(default_factory=dict)
    """Bundle of the cores on a node."""
    gpu_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """Bundle of a planned device."""
    share: dict[str, float] = field(default_factory=dict)
    """CPUs of each actor on a node: the group's cores, split over all its actors there."""


def bundles_of(plan: Plan, group: Sequence[str]) -> _Bundles:
    """A bundle a device, and one a node for the cores; colocated roles take turns, so the largest counts."""
    found = _Bundles()
    slots = [slot for role in group for slot in plan.roles[role]]
    nodes = list(dict.fromkeys(slot.node for slot in slots))
    pin = len({slot.node for role in plan.roles.values() for slot in role}) > 1
    for node in nodes:
        here = [slot for slot in slots if slot.node == node]
        at = {f"node:{node}": 0.001} if pin else {}
        for device in sorted({device for slot in here for device in slot.device_ids}):
            found.gpu_of[node, device] = len(found.resources)
            found.resources.append({"GPU": 1.0, **at})
        on_cpu = [slot for slot in here if slot.device == "cpu" and slot.cores > 0]
        cores = max((sum(s.cores for s in on_cpu if s.role == role) for role in group), default=0.0)
        if cores:
            # Ray counts in units of 1e-4.
            cores = math.floor(cores * 1e4 + 1e-6) / 1e4
            found.cpu_of[node] = len(found.resources)
            found.share[node] = math.floor(cores / len(on_cpu) * 1e4) / 1e4
            found.resources.append({"CPU": cores, **at})
    return found


class Reservation:
    """The placement groups of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._groups: list[tuple[Sequence[str], _Bundles, PlacementGroup | None]] = []
        self._physical: dict[tuple[str, int], int] = {}

    async def take(self, timeout_s: float) -> None:
        """Reserve everything, within `timeout_s` seconds; PlanError shows need and have."""
        from ray.util.placement_group import placement_group

        for group in self.plan.groups:
            bundles = bundles_of(self.plan, group)
            made = placement_group(bundles.resources, strategy="PACK") if bundles.resources else None
            self._groups.append((group, bundles, made))
        deadline = time.monotonic() + timeout_s
        for _, _, made in self._groups:
            while made is not None and not made.wait(timeout_seconds=0.05):
                if time.monotonic() > deadline:
                    message = self._shortage(timeout_s)
                    self.release()
                    raise PlanError(message)
                await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(self._probe(), timeout_s)
        except TimeoutError:
            self.release()
            raise PlanError(
                f"the reserved devices did not say which they are within placement.timeout_s={timeout_s:g} seconds: "
                "workers cannot start on their nodes (see Ray's logs there), or raise the time"
            ) from None

    def seat(self, slot: Slot) -> Seat:
        """How Ray schedules the actor of `slot`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        _, bundles, made = next(entry for entry in self._groups if slot.role in entry[0])
        if slot.device == "cuda":
            index, cpus = bundles.gpu_of[slot.node, slot.device_ids[0]], 0.0
        elif slot.cores > 0:
            index, cpus = bundles.cpu_of[slot.node], bundles.share[slot.node]
        else:
            return Seat({"num_cpus": 0})
        strategy = PlacementGroupSchedulingStrategy(made, index, placement_group_capture_child_tasks=False)
        ids = tuple(self._physical[slot.node, device] for device in slot.device_ids)
        return Seat({"num_cpus": cpus, "num_gpus": 0, "scheduling_strategy": strategy}, ids)

    def release(self) -> None:
        """Give everything back."""
        from ray.util.placement_group import remove_placement_group

        groups, self._groups = self._groups, []
        for _, _, made in groups:
            if made is not None:
                remove_placement_group(made)

    async def _probe(self) -> None:
        """Ask each bundle which physical device it got; the plan's devices of a node follow their order."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def gpu_id() -> int:
            return int(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

        for _, bundles, made in self._groups:
            asked = {}
            for planned, index in bundles.gpu_of.items():
                strategy = PlacementGroupSchedulingStrategy(made, index)
                task = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=strategy)(gpu_id)
                asked[planned] = task.remote()
            for planned, ref in asked.items():
                self._physical[planned] = await ref

    def _shortage(self, timeout_s: float) -> str:
        import ray

        lines = [
            f"the cluster did not give the devices within placement.timeout_s={timeout_s:g} seconds: another run may "
            "hold them. Ask for less, wait for it, or raise the time",
            "  need",
        ]
        for group, bundles, _ in self._groups:
            lines.append(f"    {' + '.join(group):<30}{_amounts(_total(bundles.resources))}")
        lines.append("  have, free now")
        for node, free in sorted(_free_by_node().items()):
            lines.append(f"    {node:<30}{_amounts(free)}")
        lines.append(f"    {'of in all':<30}{_amounts(ray.cluster_resources())}")
        return "\n".join(lines)


def _free_by_node() -> dict[str, Mapping[str, float]]:
    import ray
    from ray._private.state import available_resources_per_node

    names = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return {names.get(node, node): free for node, free in available_resources_per_node().items()}


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("GPU", "CPU")}


def _amounts(resources: Mapping[str, float]) -> str:
    found = [f"{resources[kind]:g} {kind}" for kind in ("GPU", "CPU") if resources.get(kind)]
    return ", ".join(found) or "nothing"
