"""Which devices `placement.device_groups` gives to which role: what the planner takes instead of choosing by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rolegraph.placement.device_groups import DeviceGroup, DeviceGroups
from rolegraph.placement.types import Device, Inventory, RoleRequest

Devices = tuple[tuple[str, int], ...]
"""Node and id of each GPU, in the order of a group's ranks."""


@dataclass(frozen=True)
class Seating:
    """Requests with the numbers of their groups, and the devices of those."""

    requests: Mapping[str, RoleRequest]
    groups: tuple[tuple[str, ...], ...]
    """Every role once, those of a device group together."""
    devices: Mapping[str, Devices]
    """Of each role whose devices are named."""
    device: Device
    problems: tuple[str, ...] = ()
    """A sentence for everything that does not fit, each naming its group."""


def seat(named: DeviceGroups, inventory: Inventory, requests: Sequence[RoleRequest]) -> Seating:
    """Give every role the devices of its group."""
    by_role = {request.role: request for request in requests}
    problems = list(named.strangers(list(by_role)))
    named = named.for_roles(by_role)
    counted = [node for node in inventory.nodes if len(node.gpus) >= (named.nproc_per_node or 1)]
    numbered = [(node.name, gpu) for node in counted for gpu in node.gpus]
    seated: dict[str, RoleRequest] = {}
    groups: list[tuple[str, ...]] = []
    devices: dict[str, Devices] = {}
    for group in named.groups:
        members = tuple(worker for worker in group.workers if worker in by_role and worker not in seated)
        for role in members:
            problems += _disagreements(named.key_of(group), group, by_role[role])
            seated[role] = _with_numbers(group, by_role[role])
        if members:
            groups.append(members)
        if group.device == "cuda":
            if max(group.devices) >= len(numbered):
                problems.append(_past_the_end(named, group, inventory, numbered))
                continue
            own = tuple(numbered[device] for device in group.devices)
            devices |= dict.fromkeys(members, own)
            problems += [problem for role in members for problem in _straddling(named.key_of(group), seated[role], own)]
    for role, request in by_role.items():
        if role in seated:
            continue
        if not request.light:
            listed = ", ".join(group.name for group in named.groups)
            problems.append(f"{named.key} has no group with the role `{role}`: add it to the workers of one ({listed})")
        seated[role] = request
        groups.append((role,))
    device: Device = "cuda" if any(group.device == "cuda" for group in named.groups) else "cpu"
    in_order = {role: seated[role] for role in by_role}
    return Seating(in_order, tuple(groups), devices, device, tuple(problems))


def _with_numbers(group: DeviceGroup, request: RoleRequest) -> RoleRequest:
    """A request with the numbers that its group names; a light role takes no GPU wherever it is."""
    if group.device == "cpu":
        return replace(request, count=group.processes, gpus=0)
    return request if request.light else replace(request, gpus=len(group.devices))


def _disagreements(key: str, group: DeviceGroup, request: RoleRequest) -> Iterator[str]:
    """Numbers in which a role and its group contradict each other."""
    role, size = request.role, request.model_parallel
    if group.device == "cpu":
        if request.gpus:
            yield f"{role}.gpus={request.gpus}, and {key} is on CPUs: leave one of them out"
        if request.count and request.count != group.processes:
            yield f"{request.key}={request.count}, and {key} has {group.processes} processes: leave {request.key} out"
        if request.is_spmd and group.processes % size:
            yield f"{key} has {group.processes} processes: the model-parallel size {size} of {role} does not divide it"
        return
    if request.light:
        return
    count = len(group.devices)
    if request.gpus is not None and request.gpus != count:
        yield f"{role}.gpus={request.gpus}, and {key} has {_plural(count)}: leave {role}.gpus out"
    if count % size:
        yield f"{key} has {_plural(count)}: the model-parallel size {size} of {role} does not divide it"
    elif request.count and request.count * (1 if request.is_spmd else size) != count:
        yield f"{request.key}={request.count}, and {key} has {_plural(count)}: leave {request.key} out"


def _straddling(key: str, request: RoleRequest, devices: Devices) -> Iterator[str]:
    """Tensor-parallel groups and engines that would cross a node."""
    size = request.block
    if request.light or size == 1 or len(devices) % size:
        return
    for first in range(0, len(devices), size):
        nodes = list(dict.fromkeys(node for node, _ in devices[first : first + size]))
        if len(nodes) > 1:
            what = "a tensor-parallel group" if request.is_spmd else "an engine"
            yield (
                f"{key} puts {what} of {request.role}, {size} devices, across {' and '.join(nodes)}: choose ranks "
                f"whose blocks of {size} stay on a node"
            )
            return


def _past_the_end(
    named: DeviceGroups, group: DeviceGroup, inventory: Inventory, numbered: Sequence[tuple[str, int]]
) -> str:
    key = named.key_of(group)
    past = [str(device) for device in group.devices if device >= len(numbered)]
    if not inventory.gpus:
        names = ", ".join(node.name for node in inventory.nodes)
        return (
            f"{key} is on GPUs, and none is on {names}: write device: CPU there, and the number of processes as ranks"
        )
    small = [node for node in inventory.nodes if len(node.gpus) < (named.nproc_per_node or 1)]
    less = ""
    if small:
        shown = ", ".join(f"{node.name} has {len(node.gpus)}" for node in small)
        less = f"; nodes with fewer GPUs than nproc_per_node={named.nproc_per_node} are passed over ({shown})"
    has = f"devices 0 to {len(numbered) - 1}" if numbered else "no devices"
    return f"{key} asks for device{'s' * (len(past) > 1)} {', '.join(past)}, and the cluster has {has}{less}"


def _plural(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"
