"""Showing a config and a plan to a person, before anything starts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rolegraph.advice import size
from rolegraph.arithmetic import sentences
from rolegraph.config import RunConfig
from rolegraph.config.check import Problem, resolve
from rolegraph.config.compose import Composed, as_config
from rolegraph.config.load import filled
from rolegraph.errors import ConfigError
from rolegraph.estimate import estimate
from rolegraph.needs import DeviceNeed, Estimate
from rolegraph.placement import Inventory, Plan, Slot, plan, requests, this_machine


def print_config(source: Composed, *, package: str | None = None, resolved: bool = False) -> None:
    """The whole config as YAML, defaults of all dataclasses filled in; `package` picks one node."""
    config = as_config(filled(source.tree))
    problems: list[Problem] = []
    tree: Any = resolve(config, problems) if resolved else OmegaConf.to_container(config)
    if problems:
        raise ConfigError("; ".join(f"{'.'.join(map(str, p.path))}: {p.text}" for p in problems))
    shown: Any = OmegaConf.create(tree)
    if package and package != "_global_":
        shown = OmegaConf.select(shown, package, throw_on_missing=False)
        if shown is None:
            raise ConfigError(f"--package {package}: there is no such node")
    print(OmegaConf.to_yaml(shown) if OmegaConf.is_config(shown) else shown, end="")


PIPED_WIDTH = 120
"""Columns of what goes to a file or a pipe, which have no width of their own."""
FEW_SLOTS = 128
"""A role with more ranks is shown a row a node."""


def print_plan(
    run: RunConfig, inventory: Inventory | None = None, console: Console | None = None, *, fetch_s: float = 0.0
) -> tuple[Plan, Estimate]:
    """Where every rank runs, how batches divide, what memory that takes; PlanError when the roles do not fit.

    A model that is on the hub alone is asked for its config.json for at most `fetch_s` seconds.
    """
    inventory = inventory or this_machine()
    placed = plan(inventory, requests(run.roles), run.placement)
    console = console or Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    console.print(_slots_table(placed))
    for group in placed.groups:
        if len(group) > 1:
            console.print(f"{', '.join(group)} share devices and take turns.", highlight=False)
    table = Table(title=f"{run.algorithm.name}: batches", title_justify="left", show_header=False)
    for name, text in sentences(run, placed):
        table.add_row(name, text)
    console.print(table)
    found = estimate(run, placed, inventory, fetch_s=fetch_s)
    for need in found.needs:
        console.print(_memory_table(need))
        for line in (*need.notes, *need.warnings):
            console.print(("warning: " if line in need.warnings else "") + line, highlight=False, markup=False)
    for role, why in found.unknown.items():
        console.print(f"{role}: no estimate of its memory, {why}.", highlight=False, markup=False)
    return placed, found


def _slots_table(placed: Plan) -> Table:
    table = Table(title="Placement", title_justify="left")
    for column in ("role", "rank", "mesh", "node", "device", "share", "threads"):
        right = column in ("rank", "share", "threads")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for slots in placed.roles.values():
        rows = [[slot] for slot in slots]
        if len(slots) > FEW_SLOTS:
            rows = [list(found) for _, found in groupby(slots, key=lambda slot: slot.node)]
        for row in rows:
            table.add_row(*_row(row))
        table.add_section()
    return table


def _row(slots: list[Slot]) -> tuple[str, ...]:
    """A slot, or several that follow each other on a node."""
    first, last = slots[0], slots[-1]
    ids = [device for slot in slots for device in slot.device_ids]
    device = _device(first)
    if first is not last:
        device = f"GPU {ids[0]}-{ids[-1]}" if ids else f"{len(slots)} x {device}"
    share = f"{first.share:.0%}" if first.device == "cuda" else "-"
    return first.role, _span([s.rank for s in slots]), _mesh(slots), first.node, device, share, str(first.threads)


def _mesh(slots: list[Slot]) -> str:
    """Coordinates along the axes that are longer than 1."""
    sizes = {axis: getattr(slots[0].mesh, axis) for axis in ("dp", "pp", "cp", "tp")}
    at = {axis: _span([getattr(slot.mesh, f"{axis}_rank") for slot in slots]) for axis in sizes}
    return " ".join(f"{axis} {at[axis]}/{length}" for axis, length in sizes.items() if length > 1) or "-"


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def _device(slot: Slot) -> str:
    if slot.device == "cuda":
        return "GPU " + ",".join(map(str, slot.device_ids))
    return f"CPU {slot.cores:.3g} core{'' if slot.cores == 1 else 's'}" if slot.cores else "CPU, beside the others"


def _memory_table(need: DeviceNeed) -> Table:
    """Parts of roles down, phases across."""
    room = f", {size(need.capacity)}" if need.capacity is not None else ""
    table = Table(title=f"Memory of {need.where}{room}, estimated", title_justify="left")
    table.add_column("")
    for phase in need.phases:
        table.add_column(phase.name, justify="right")
    found = [{(use.role, use.part): use.bytes for use in phase.uses} for phase in need.phases]
    for role, part in dict.fromkeys(key for uses in found for key in uses):
        cells = [size(uses[role, part]) if (role, part) in uses else "-" for uses in found]
        table.add_row(f"{role} {part.replace('_', ' ')}", *cells)
    table.add_section()
    table.add_row("in all", *(size(phase.total) for phase in need.phases))
    return table
