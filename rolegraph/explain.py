"""Showing a config and a plan to a person, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rolegraph.config import RunConfig
from rolegraph.config.check import Problem, resolve
from rolegraph.config.compose import Composed, as_config
from rolegraph.config.load import filled
from rolegraph.errors import ConfigError
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


def print_plan(run: RunConfig, inventory: Inventory | None = None, console: Console | None = None) -> Plan:
    """Where every rank runs and how batches divide; returns the plan. Raises PlanError when it does not fit."""
    placed = plan(inventory or this_machine(), requests(run.roles), run.placement)
    console = console or Console(soft_wrap=True)
    console.print(_slots_table(placed))
    for group in placed.groups:
        if len(group) > 1:
            console.print(f"{', '.join(group)} share devices and take turns.", highlight=False)
    table = Table(title=f"{run.algorithm.name}: batches", title_justify="left", show_header=False)
    for name, text in arithmetic(run, placed):
        table.add_row(name, text)
    console.print(table)
    return placed


def _slots_table(placed: Plan) -> Table:
    table = Table(title="Placement", title_justify="left")
    for column in ("role", "rank", "mesh", "node", "device", "threads"):
        table.add_column(column, justify="right" if column in ("rank", "threads") else "left")
    for slots in placed.roles.values():
        for slot in slots:
            table.add_row(slot.role, str(slot.rank), _mesh(slot), slot.node, _device(slot), str(slot.threads))
        table.add_section()
    return table


def _mesh(slot: Slot) -> str:
    """Coordinates along the axes that are longer than 1."""
    mesh = slot.mesh
    axes = (("dp", mesh.dp_rank, mesh.dp), ("pp", mesh.pp_rank, mesh.pp), ("cp", mesh.cp_rank, mesh.cp))
    named = [f"{name} {at}/{size}" for name, at, size in (*axes, ("tp", mesh.tp_rank, mesh.tp)) if size > 1]
    return " ".join(named) or "-"


def _device(slot: Slot) -> str:
    if slot.device == "cuda":
        return "GPU " + ",".join(map(str, slot.device_ids))
    return f"CPU {slot.cores:.3g} core{'' if slot.cores == 1 else 's'}" if slot.cores else "CPU, beside the others"


def arithmetic(run: RunConfig, placed: Plan) -> Iterator[tuple[str, str]]:
    """How a step's samples divide: names and sentences."""
    options = run.algorithm.config
    size = getattr(options, "global_batch_size", None)
    if size is None:
        return
    group = getattr(options, "num_generations", None)
    steps = getattr(options, "steps_per_generation", 1)
    if group is not None:
        samples = size * steps
        yield "a generation", f"{samples // group} prompts x {group} samples = {samples} samples"
        rounds = getattr(options, "num_iterations", 1)
        over = f", gone over {rounds} times" if rounds > 1 else ""
        yield "is trained on in", f"{steps} optimizer step{'s' if steps > 1 else ''} of {size} samples{over}"
        if replicas := len(placed.roles.get("rollout", ())):
            yield "a rollout replica", f"samples about {samples / replicas:g} of them"
    else:
        yield "a step", f"{size} rows"
    if train := placed.roles.get("train"):
        yield from _train_arithmetic(run, size, train[0].mesh.dp)
    if run.max_steps is None:
        yield "in all", "one pass over the dataset (max_steps=null)"
    else:
        yield "in all", f"{run.max_steps} steps, {run.max_steps * size} {'samples' if group else 'rows'}"


def _train_arithmetic(run: RunConfig, size: int, data_parallel: int) -> Iterator[tuple[str, str]]:
    low, rest = divmod(size, data_parallel)
    rows = f"{low} rows" if not rest else f"{low} or {low + 1} rows ({size} does not divide by {data_parallel})"
    yield "a data-parallel rank", f"of {data_parallel}, trains {rows} a step"
    config = run.roles["train"].config
    most = getattr(config, "rows_per_micro_batch", None) or getattr(config, "micro_batch_size", None)
    tokens = getattr(config, "max_tokens_per_micro_batch", None)
    largest = low + (rest > 0)
    if most:
        count = math.ceil(largest / most)
        text = f"{count} micro-batch{'es' if count > 1 else ''} a rank of at most {most} rows"
        yield "in", text + (f" and {tokens} tokens, more where rows are long" if tokens else "")
    elif tokens:
        yield "in", f"micro-batches of at most {tokens} tokens, {largest} at most"
