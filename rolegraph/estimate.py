"""What a plan needs of each device's memory, phase by phase, and the key that lowers it where that is too much.

The formulas are in `rolegraph.placement.memory`; here a checked config becomes their sizes. Nothing is started, and
only a model's config.json is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolegraph.advice import notes, warnings
from rolegraph.config.model_rules import context_length, model_of, room
from rolegraph.config.rules import settle
from rolegraph.config.schema import RunConfig
from rolegraph.models.architecture import Architecture, UnknownArchitectureError, architecture, read_config
from rolegraph.needs import DeviceNeed, Estimate, bound_roles, phases_of
from rolegraph.placement import Inventory, Plan, Slot
from rolegraph.placement.memory import FULL_PRECISION, USABLE, Copy, Engine, Holder, Sharded, Trainer

GPU_STEP_TOKENS = 8192
"""Tokens of an engine step on GPUs where `max_num_batched_tokens` is not given."""
CPU_STEP_TOKENS = 4096
CPU_CACHE_PART = 8
"""An engine on a CPU takes an eighth of the machine's memory for its cache at the most."""


def estimate(run: RunConfig, plan: Plan, inventory: Inventory, *, fetch_s: float = 0.0) -> Estimate:
    """Estimate a plan; a model on the hub is asked for its config.json for at most `fetch_s` seconds."""
    run = settle(run, plan)
    holders: dict[str, Holder] = {}
    unknown: dict[str, str] = {}
    for role in run.roles:
        if not hasattr(run.roles[role].config, "dtype"):
            continue
        try:
            sizes = architecture(read_config(model_of(run, role), fetch_s=fetch_s))
            holders[role] = _holder(run, role, sizes, plan.roles[role], inventory)
        except UnknownArchitectureError as error:
            unknown[role] = str(error)
    found = _on_gpus if plan.device == "cuda" else _on_cpus
    return Estimate(tuple(found(run, plan, inventory, holders)), unknown)


def _holder(run: RunConfig, role: str, sizes: Architecture, slots: Sequence[Slot], inventory: Inventory) -> Holder:
    config, on_gpu = run.roles[role].config, slots[0].device == "cuda"
    width = FULL_PRECISION if config.dtype == "float32" or (config.dtype == "auto" and not on_gpu) else 2
    if _has(config, TRAINER_KEYS):
        return _trainer(run, config, sizes, slots[0], width)
    if _has(config, SHARDED_KEYS):
        return _sharded(run, config, sizes, slots[0], width)
    need = room(run, role)
    longest = run.data.max_length if need is None else need.tokens
    if _has(config, ENGINE_KEYS):
        memory = _least([node.gpu_memory if on_gpu else node.memory for node in _nodes(inventory, slots)])
        return _engine(config, sizes, slots[0], width, longest, memory)
    tokens = max(getattr(config, "max_tokens_per_micro_batch", 0) or 0, longest)
    mesh, pipeline = slots[0].mesh, getattr(config, "pipeline_model_parallel_size", 1)
    in_sequence = bool(getattr(config, "uses_sequence_parallel", False))
    return Copy(sizes, width, tokens, pipeline, mesh.tp, mesh.cp, mesh.ep, sequence_parallel=in_sequence)


TRAINER_KEYS = (
    "tensor_model_parallel_size",
    "uses_sequence_parallel",
    "use_distributed_optimizer",
    "reference",
    "megatron",
)
"""Attributes of a config by which a role counts as a trainer here; the ones of a trainer whose ranks share all state
and of an engine follow, others are copies."""
SHARDED_KEYS = ("reference", "gradient_checkpointing", "reduce_each_micro_batch")
ENGINE_KEYS = ("max_num_seqs", "gpu_memory_utilization", "kv_cache_bytes")


def _has(config: Any, keys: Sequence[str]) -> bool:
    return all(hasattr(config, key) for key in keys)


def _trainer(run: RunConfig, config: Any, sizes: Architecture, slot: Slot, width: int) -> Trainer:
    mesh = slot.mesh
    return Trainer(
        tensor=mesh.tp,
        pipeline=mesh.pp,
        context=mesh.cp,
        expert=mesh.ep,
        vocabulary_multiple=mesh.tp * (128 if slot.device == "cuda" else 1),
        sequence_parallel=bool(config.uses_sequence_parallel),
        distributed_optimizer=bool(config.use_distributed_optimizer),
        recompute=config.megatron.get("recompute_granularity") == "full",
        **_training(run, config, sizes, mesh.dp, width),
    )


def _sharded(run: RunConfig, config: Any, sizes: Architecture, slot: Slot, width: int) -> Sharded:
    return Sharded(
        recompute=bool(config.gradient_checkpointing),
        reduces_each=bool(config.reduce_each_micro_batch),
        **_training(run, config, sizes, slot.mesh.dp, width),
    )


def _training(run: RunConfig, config: Any, sizes: Architecture, data: int, width: int) -> dict[str, Any]:
    """What any trainer's memory depends on, with `data` data-parallel ranks."""
    longest = context_length(run) or run.data.max_length
    on_rank = math.ceil(getattr(run.algorithm.config, "global_batch_size", 1) / data)
    rows = min(getattr(config, "rows_per_micro_batch", None) or on_rank, on_rank)
    tokens = min(rows * longest, getattr(config, "max_tokens_per_micro_batch", None) or rows * longest)
    adapter = getattr(config, "adapter", None)
    return {
        "model": sizes,
        "adapter_rank": adapter.rank if adapter else 0,
        "adapter_targets": adapter.targets if adapter else (),
        "width": width,
        "tokens": tokens,
        "micro_batches": math.ceil(on_rank * longest / tokens),
        "data": data,
        "reference": config.reference is not None,
        "average": any(getattr(spec.config, "weights", None) == "average" for spec in bound_roles(run)),
    }


def _engine(config: Any, sizes: Architecture, slot: Slot, width: int, longest: int, memory: int | None) -> Engine:
    on_gpu = slot.device == "cuda"
    length = getattr(config, "max_model_len", None) or longest
    step = GPU_STEP_TOKENS if on_gpu else max(length, CPU_STEP_TOKENS, config.max_num_seqs)
    is_tensor_parallel = hasattr(config, "tensor_parallel_size")
    split_by = "tensor_parallel_size" if is_tensor_parallel else "pipeline_model_parallel_size"
    engine = Engine(
        model=sizes,
        width=width,
        max_len=length,
        max_seqs=config.max_num_seqs,
        batch_tokens=int(getattr(config, "engine_kwargs", {}).get("max_num_batched_tokens") or step),
        tensor=getattr(config, split_by, 1),
        share_bytes=round(memory * config.gpu_memory_utilization) if on_gpu and memory is not None else None,
        cache_bytes=config.kv_cache_bytes,
        fills=is_tensor_parallel,
        split_by=split_by,
    )
    if on_gpu or config.kv_cache_bytes or memory is None:
        return engine
    cache = min(engine.max_seqs * engine.sequence(), memory // CPU_CACHE_PART)
    return Engine(**{**vars(engine), "cache_bytes": max(cache, 2 * engine.sequence())})


def _nodes(inventory: Inventory, slots: Sequence[Slot]) -> list[Any]:
    names = {slot.node for slot in slots}
    return [node for node in inventory.nodes if node.name in names]


def _least(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _on_gpus(run: RunConfig, plan: Plan, inventory: Inventory, holders: Mapping[str, Holder]) -> Iterator[DeviceNeed]:
    """A need for each group of roles on GPUs whose models are known."""
    for group in plan.groups:
        roles = tuple(role for role in group if plan.roles[role][0].device == "cuda")
        if not roles or not all(role in holders for role in roles):
            continue
        slots = plan.roles[roles[0]]
        nodes = _nodes(inventory, slots)
        capacity = _least([node.gpu_memory for node in nodes])
        count = sum(len(slot.device_ids) for slot in slots)
        names = ", ".join(dict.fromkeys(node.gpu_name for node in nodes if node.gpu_name))
        where = f"each of {count} GPUs" if count > 1 else "the GPU"
        phases = phases_of(run, dict.fromkeys(roles, 1), holders, shared=len(roles) > 1)
        usable = None if capacity is None else round(USABLE * capacity)
        yield DeviceNeed(
            roles,
            f"{where} of {', '.join(roles)}" + (f" ({names})" if names else ""),
            tuple(node.name for node in nodes),
            capacity,
            usable,
            phases,
            tuple(note for role in roles for note in notes(role, holders[role])),
            tuple(warnings(run, phases, capacity, usable, holders, len(roles) > 1)),
        )


def _on_cpus(run: RunConfig, plan: Plan, inventory: Inventory, holders: Mapping[str, Holder]) -> Iterator[DeviceNeed]:
    """A need for each kind of machine: all ranks on it together, nothing is put aside there."""
    kinds: dict[tuple[tuple[tuple[str, int], ...], int | None], list[str]] = {}
    for node in inventory.nodes:
        here = Counter(s.role for role in holders for s in plan.roles[role] if s.node == node.name)
        if here:
            kinds.setdefault((tuple(here.items()), node.memory), []).append(node.name)
    for (ranks, memory), names in kinds.items():
        phases = phases_of(run, dict(ranks), holders, shared=False)
        where = names[0] if len(names) == 1 else f"each of {len(names)} machines"
        roles = tuple(role for role, _ in ranks)
        found = tuple(warnings(run, phases, memory, memory, holders, shared=False))
        trained = tuple(
            note for role in roles if isinstance(holders[role], Trainer) for note in notes(role, holders[role])
        )
        yield DeviceNeed(
            roles, f"{where} with {', '.join(roles)}", tuple(names), memory, memory, phases, trained, found
        )
