"""Why roles find no place: what to change, and the need/have table by role and node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from rolegraph.placement.types import Inventory, Node, RoleRequest

Unit = Literal["GPUs", "cores"]
Roles = Mapping[str, RoleRequest]
Groups = Sequence[tuple[str, ...]]
FEW_NODES = 16
"""More nodes than these are shown by their number, the alike together."""


def no_gpus(missing: Sequence[str], inventory: Inventory, by_role: Roles, groups: Groups) -> str:
    """The error where roles find no devices."""
    largest = max((len(node.gpus) for node in inventory.nodes), default=0)
    lines = []
    for request in (by_role[role] for role in missing):
        if request.block > largest:
            what = "a tensor-parallel group" if request.is_spmd else "an engine"
            lines.append(
                f"`{request.role}`: {what} of {request.block} GPUs stays on one node, and the largest has {largest}: "
                f"lower {request.tensor_key} ({request.tensor})"
            )
    asked = sum(max(by_role[role].devices for role in group) for group in groups)
    names = ", ".join(f"`{role}`" for role in missing)
    keys = ", ".join(f"{role}.gpus or {by_role[role].key}" for role in missing)
    if asked > inventory.gpus:
        lines.append(
            f"no room for {names}: {asked} GPUs are asked for, and there are {inventory.gpus}. Lower {keys}, or share "
            "devices with placement=colocate"
        )
    elif not lines:
        blocks = ", ".join(f"{by_role[role].block} for `{role}`" for role in missing)
        tensor = ", ".join(by_role[role].tensor_key for role in missing)
        lines.append(
            f"no room for {names}: there are {inventory.gpus} GPUs, but what is left on each node does not hold the "
            f"blocks that stay together ({blocks}). Lower {tensor}, or {keys}"
        )
    return "\n".join([*lines, *need_and_have(inventory, by_role, groups, "GPUs")])


def no_cores(missing: Sequence[str], inventory: Inventory, by_role: Roles, groups: Groups, *, shareable: bool) -> str:
    """The error where roles find no cores; `shareable`: sharing them in turns would help."""
    names = ", ".join(f"`{role}`" for role in missing)
    keys = ", ".join(f"{role}.cpus or {by_role[role].key}" for role in missing)
    where = "the cores of the nodes do" if shareable else "the cores beside the GPUs of a node do"
    share = ", or share devices with placement=colocate" if shareable else ""
    first = f"no room for {names}: {where} not suffice. Lower {keys}{share}"
    return "\n".join([first, *need_and_have(inventory, by_role, groups, "cores")])


def need_and_have(inventory: Inventory, by_role: Roles, groups: Groups, unit: Unit) -> list[str]:
    """Need by role and have by node, for error messages."""
    on_gpu = unit == "GPUs"
    lines = [f"  {'need':<28}{unit}"]
    total = 0.0
    for group in groups:
        needs = {role: float(by_role[role].devices) if on_gpu else by_role[role].cores for role in group}
        total += max(needs.values())
        for role, need in needs.items():
            size = f"{by_role[role].actors} {'ranks' if by_role[role].is_spmd else 'replicas'}"
            shares = f", shared with {', '.join(r for r in group if r != role)}" if len(group) > 1 else ""
            amount = f"{need:g}" if need or on_gpu else "any"
            lines.append(f"    {role:<26}{amount:<6}({size}{shares})")
    lines.append(f"    {'in all':<26}{total:g}")
    lines.append(f"  {'have':<28}{unit}")
    for name, amount in _amounts(inventory.nodes, on_gpu):
        lines.append(f"    {name:<26}{amount}")
    return lines


def _amounts(nodes: Sequence[Node], on_gpu: bool) -> list[tuple[str, str]]:
    def amount(node: Node) -> float:
        return len(node.gpus) if on_gpu else node.cpus

    if len(nodes) <= FEW_NODES:
        return [(node.name, f"{amount(node):g}") for node in nodes]
    alike = [(each, list(found)) for each, found in groupby(nodes, key=amount)]
    return [(f"{found[0].name} to {found[-1].name}", f"{len(found)} x {each:g}") for each, found in alike]
