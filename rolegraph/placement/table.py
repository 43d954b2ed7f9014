"""The need/have table of a plan that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolegraph.placement.types import Device, Inventory, RoleRequest


def no_room(
    missing: Sequence[str],
    inventory: Inventory,
    by_role: Mapping[str, RoleRequest],
    groups: Sequence[tuple[str, ...]],
    device: Device,
) -> str:
    """What to change when roles found no place."""
    unit = "GPUs" if device == "cuda" else "cores"
    names = ", ".join(f"`{role}`" for role in missing)
    keys = ", ".join(f"{role}.{'gpus' if device == 'cuda' else 'cpus'} or {by_role[role].key}" for role in missing)
    lines = [f"no room for {names}: the {unit} of the nodes do not suffice. Lower {keys}, or share devices with "]
    lines[0] += "placement=colocate"
    return "\n".join([*lines, *need_and_have(inventory, by_role, groups, device)])


def need_and_have(
    inventory: Inventory,
    by_role: Mapping[str, RoleRequest],
    groups: Sequence[tuple[str, ...]],
    device: Device,
) -> list[str]:
    """Need by role and have by node, for error messages."""
    on_gpu = device == "cuda"
    unit = "GPUs" if on_gpu else "cores"
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
    for node in inventory.nodes:
        lines.append(f"    {node.name:<26}{len(node.gpus) if on_gpu else node.cpus:g}")
    return lines
