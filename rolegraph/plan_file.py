"""A plan for machines: what `rolegraph plan -o FILE` writes, as JSON.

version     1; a later one may add keys, never change these
device      "cpu" or "cuda": where the roles run
cluster     a list of nodes: name, gpus (ids), cpus (cores), gpu_name, gpu_memory and memory (bytes, null: unknown)
groups      lists of roles; those of one list share devices, and every role is in one
roles       by name: target (import path), count (ranks or replicas), mesh (sizes dp, pp, tp, cp, ep), slots
  slots     in rank order: rank, node, device ("cpu", "cuda"), device_ids (of the node), share (of each device's
            memory), cores, threads, mesh (coordinates dp, pp, tp, cp)
bundles     a list for each group, in the order of `groups`: what is reserved of Ray, in this order (GPU, CPU, node)
arithmetic  how a step divides, see `rolegraph.arithmetic.Batches` (`Candidates` of a sampling run); null for an
            algorithm that has neither
memory      devices: a list of roles, where, nodes, capacity and usable (bytes, null: unknown), phases (by name: by
            role: by part: bytes), notes, warnings; unknown: why a role has no estimate, by role
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolegraph.arithmetic import batches, candidates
from rolegraph.config import RunConfig
from rolegraph.errors import ConfigError
from rolegraph.needs import DeviceNeed, Estimate
from rolegraph.placement import Inventory, Plan, Slot
from rolegraph.reservation import bundles_of

VERSION = 1


def write_plan(path: str, run: RunConfig, plan: Plan, found: Estimate, inventory: Inventory) -> None:
    """Write the plan; ConfigError where the file cannot be written."""
    text = json.dumps(as_plain(run, plan, found, inventory), indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {path}: the plan cannot be written there: {error.strerror}") from error


def as_plain(run: RunConfig, plan: Plan, found: Estimate, inventory: Inventory) -> dict[str, Any]:
    """The plan as plain values, as described above."""
    arithmetic = batches(run, plan) or candidates(run, plan)
    return {
        "version": VERSION,
        "device": plan.device,
        "cluster": [asdict(node) for node in inventory.nodes],
        "groups": [list(group) for group in plan.groups],
        "roles": {role: _role(run.roles[role].target, slots) for role, slots in plan.roles.items()},
        "bundles": _bundles(plan),
        "arithmetic": None if arithmetic is None else asdict(arithmetic),
        "memory": {"devices": [_need(need) for need in found.needs], "unknown": dict(found.unknown)},
    }


def _bundles(plan: Plan) -> list[list[dict[str, Any]]]:
    found = bundles_of(plan)
    by_group: list[list[dict[str, Any]]] = [[] for _ in plan.groups]
    for group, node, resources in zip(found.groups, found.nodes, found.resources, strict=True):
        by_group[group].append({**resources, "node": node})
    return by_group


def _role(target: str, slots: tuple[Slot, ...]) -> dict[str, Any]:
    mesh = slots[0].mesh
    sizes = {axis: getattr(mesh, axis) for axis in ("dp", "pp", "tp", "cp", "ep")}
    return {"target": target, "count": len(slots), "mesh": sizes, "slots": [_slot(slot) for slot in slots]}


def _slot(slot: Slot) -> dict[str, Any]:
    names = ("rank", "node", "device", "device_ids", "share", "cores", "threads")
    coordinates = {axis: getattr(slot.mesh, f"{axis}_rank") for axis in ("dp", "pp", "tp", "cp")}
    return {**{name: getattr(slot, name) for name in names}, "mesh": coordinates}


def _need(need: DeviceNeed) -> dict[str, Any]:
    phases: dict[str, dict[str, dict[str, int]]] = {}
    for phase in need.phases:
        by_role = phases.setdefault(phase.name, {})
        for use in phase.uses:
            by_role.setdefault(use.role, {})[use.part] = use.bytes
    names = ("roles", "where", "nodes", "capacity", "usable", "notes", "warnings")
    return {**{name: getattr(need, name) for name in names}, "phases": phases}
