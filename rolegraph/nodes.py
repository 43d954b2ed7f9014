"""The machines of a Ray cluster: what each is called, what it has, what of that is free, and who holds the rest."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolegraph.placement import Inventory, Node

SHORT_ID = 6
"""Characters of a node id beside an address that several nodes share."""
KINDS = ("GPU", "CPU")


@dataclass(frozen=True)
class RayNode:
    """One node of a cluster that is alive."""

    name: str
    """Its IP address; `ADDRESS#ID` with the first characters of its id where several nodes share the address."""
    id: str
    address: str
    resources: Mapping[str, float]

    @property
    def selector(self) -> dict[str, str]:
        """The labels that a bundle asks for to be on this node: `node:IP` would not tell nodes of one machine apart."""
        return {"ray.io/node-id": self.id}


def named(nodes: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """The living ones of Ray's node records under names that tell them apart, in the order of the names."""
    alive = [node for node in nodes if node["Alive"]]
    shared = Counter(str(node["NodeManagerAddress"]) for node in alive)
    found = []
    for node in alive:
        address, node_id = str(node["NodeManagerAddress"]), str(node["NodeID"])
        name = address if shared[address] == 1 else f"{address}#{node_id[:SHORT_ID]}"
        found.append(RayNode(name, node_id, address, dict(node["Resources"])))
    return sorted(found, key=lambda node: (_numbers(node.address), node.name))


def _numbers(address: str) -> tuple[int, ...] | tuple[()]:
    """An IPv4 address as numbers, so that 10.0.0.10 comes after 10.0.0.9."""
    parts = address.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def ray_nodes() -> list[RayNode]:
    """The living nodes of the connected cluster."""
    import ray

    return named(ray.nodes())


def is_address(name: str) -> bool:
    """Whether a plan's name of a node is one that a cluster gave it."""
    try:
        ipaddress.ip_address(name.partition("#")[0])
    except ValueError:
        return False
    return True


def find_node(name: str, nodes: Sequence[RayNode]) -> RayNode | None:
    """The node that a plan calls `name`; null when there is none, or more than one."""
    address, _, short = name.partition("#")
    found = [node for node in nodes if node.address == address and node.id.startswith(short)]
    return found[0] if len(found) == 1 else None


def cluster_inventory(*, free: bool = False) -> Inventory:
    """The nodes of the connected cluster; `free`: with what nobody holds just now.

    GPUs are counted from 0 on each node: which devices these are is known once they are reserved.
    """
    left = free_resources() if free else {}
    nodes = []
    for node in ray_nodes():
        have = left.get(node.id, {}) if free else node.resources
        kind = next((name for name in node.resources if name.startswith("accelerator_type:")), "")
        nodes.append(
            Node(
                node.name,
                tuple(range(int(have.get("GPU", 0)))),
                float(have.get("CPU", 0)),
                gpu_name=kind.partition(":")[2] if have.get("GPU") else "",
            )
        )
    return Inventory(tuple(nodes))


def free_resources() -> dict[str, Mapping[str, float]]:
    """What nobody holds, by node id."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())


def amounts(resources: Mapping[str, float]) -> str:
    """GPUs and CPUs in words."""
    found = [f"{resources[kind]:g} {kind}" for kind in KINDS if resources.get(kind)]
    return ", ".join(found) or "nothing"


@dataclass(frozen=True)
class Holder:
    """Something that holds devices or cores of the cluster, or waits for some."""

    what: str
    by_node: Mapping[str, Mapping[str, float]]
    """Amounts by the name of the node; under an empty name what it waits for."""
    job: str

    def line(self) -> str:
        """One line of an error message."""
        places = [
            f"{amounts(held)} on {node}" if node else f"waits for {amounts(held)}"
            for node, held in self.by_node.items()
        ]
        return f"{self.what}: {'; '.join(places)}" + (f" ({self.job})" if self.job else "")


def holders(*, but: str = "") -> list[Holder]:
    """Placement groups, and actors outside of them, that hold GPUs or CPUs or wait for them.

    `but` is the id of a placement group that is left out. The cluster is asked through Ray's own tables, which answer
    without its dashboard; what they do not tell is left out.
    """
    found: list[Holder] = []
    with contextlib.suppress(Exception):
        import ray

        names = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
        names.update({node.id: node.name for node in ray_nodes()})
        jobs = _jobs()
        found = [*_groups(names, jobs, but), *_actors(names, jobs)]
    return found


def _groups(names: Mapping[str, str], jobs: Mapping[str, str], but: str) -> list[Holder]:
    from ray.util.placement_group import placement_group_table

    found = []
    for group_id, group in placement_group_table().items():
        if group_id == but or group["state"] == "REMOVED":
            continue
        by_node: dict[str, dict[str, float]] = {}
        for index, bundle in group["bundles"].items():
            node = names.get(group["bundles_to_node_id"].get(index, ""), "")
            _add(by_node.setdefault(node, {}), bundle)
        if any(by_node.values()):
            name = group["name"] or group_id[:SHORT_ID]
            found.append(Holder(f"placement group {name}", by_node, jobs.get(_job_in(group_id), "")))
    return found


def _actors(names: Mapping[str, str], jobs: Mapping[str, str]) -> list[Holder]:
    """Actors with resources of their own; those inside a placement group hold what that reserved."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    found = []
    for record in state._connect_and_get_accessor().get_actor_table(None, None):
        actor = gcs_pb2.ActorTableData.FromString(record)
        held = _add({}, actor.required_resources)
        if actor.state == gcs_pb2.ActorTableData.DEAD or not held:
            continue
        name = f" {actor.name}" if actor.name else ""
        node = names.get(actor.address.node_id.hex(), "")
        found.append(Holder(f"actor {actor.class_name}{name}", {node: held}, jobs.get(actor.job_id.hex(), "")))
    return found


def _add(total: dict[str, float], resources: Mapping[str, float]) -> dict[str, float]:
    """Add the GPUs and CPUs of `resources`; what an actor has of a bundle carries the bundle's name, and counts not."""
    for kind in KINDS:
        if resources.get(kind):
            total[kind] = total.get(kind, 0.0) + resources[kind]
    return total


def _jobs() -> dict[str, str]:
    """The running programs by job id, as a person would find them."""
    from ray._private.state import jobs

    found = {}
    for job in jobs():
        where = f"pid {job['DriverPid']} on {job['DriverIPAddress']}"
        found[str(job["JobID"])] = f"{job.get('Entrypoint') or 'a program'}, {where}"
    return found


def _job_in(ray_id: str) -> str:
    """The job id at the end of the id of an actor or of a placement group: 4 bytes in hexadecimal digits."""
    return ray_id[-8:]
