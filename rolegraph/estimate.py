"""What a plan needs of each device's memory, phase by phase, and the key that lowers it where that is too much.

The formulas are in `rolegraph.placement.memory`; here a checked config becomes their sizes. Nothing is started, and
only a model's config.json is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolegraph.config.model_rules import context_length, model_of, room
from rolegraph.config.rules import settle
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.models.architecture import Architecture, UnknownArchitectureError, architecture, read_config
from rolegraph.placement import Inventory, Plan, Slot
from rolegraph.placement.memory import FULL_PRECISION, HEAD_BUDGET, USABLE, Copy, Engine, Holder, Trainer
from rolegraph.role import is_teacher
from rolegraph.turns import PHASES, Phase

ORDER = ("generate", "logprobs", "ref_logprobs", "teacher", "teach", "train", "sync")
"""The phases of a step that take memory, in their order."""
GPU_STEP_TOKENS = 8192
"""Tokens of an engine step on GPUs where `max_num_batched_tokens` is not given."""
CPU_STEP_TOKENS = 4096
CPU_CACHE_PART = 8
"""An engine on a CPU takes an eighth of the machine's memory for its cache at the most."""
GIB = 2**30


@dataclass(frozen=True)
class Use:
    """Bytes of one part of one role on a device."""

    role: str
    part: str
    bytes: int


@dataclass(frozen=True)
class PhaseNeed:
    """What is on a device during one phase."""

    name: str
    uses: tuple[Use, ...]

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(use.bytes for use in self.uses)


@dataclass(frozen=True)
class DeviceNeed:
    """What the devices of one colocate group hold, or the machines of a run on CPUs."""

    roles: tuple[str, ...]
    where: str
    """For people: `each of 8 GPUs`."""
    nodes: tuple[str, ...]
    capacity: int | None
    """Bytes of the smallest of these devices; null where nothing told."""
    usable: int | None
    """Of these, what roles may take."""
    phases: tuple[PhaseNeed, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """All devices of a plan, and the roles that could not be estimated, with the reason."""

    needs: tuple[DeviceNeed, ...]
    unknown: Mapping[str, str]


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
"""Attributes of a config by which a role counts as a trainer here; the ones of an engine follow, others are copies."""
ENGINE_KEYS = (
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "engine_kwargs",
)


def _has(config: Any, keys: Sequence[str]) -> bool:
    return all(hasattr(config, key) for key in keys)


def _trainer(run: RunConfig, config: Any, sizes: Architecture, slot: Slot, width: int) -> Trainer:
    mesh = slot.mesh
    longest = context_length(run) or run.data.max_length
    on_rank = math.ceil(getattr(run.algorithm.config, "global_batch_size", 1) / mesh.dp)
    rows = min(getattr(config, "rows_per_micro_batch", None) or on_rank, on_rank)
    tokens = min(rows * longest, getattr(config, "max_tokens_per_micro_batch", None) or rows * longest)
    return Trainer(
        model=sizes,
        width=width,
        tokens=tokens,
        micro_batches=math.ceil(on_rank * longest / tokens),
        tensor=mesh.tp,
        pipeline=mesh.pp,
        context=mesh.cp,
        expert=mesh.ep,
        data=mesh.dp,
        vocabulary_multiple=mesh.tp * (128 if slot.device == "cuda" else 1),
        sequence_parallel=bool(config.uses_sequence_parallel),
        distributed_optimizer=bool(config.use_distributed_optimizer),
        reference=config.reference is not None,
        average=any(getattr(spec.config, "weights", None) == "average" for spec in _bound(run)),
        recompute=config.megatron.get("recompute_granularity") == "full",
    )


def _bound(run: RunConfig) -> list[Spec]:
    """Roles that the trainer's actors play as well: the policy as its own teacher."""
    return [spec for spec in run.roles.values() if getattr(spec.config, "binds", None) == "train"]


def _engine(config: Any, sizes: Architecture, slot: Slot, width: int, longest: int, memory: int | None) -> Engine:
    on_gpu = slot.device == "cuda"
    length = config.max_model_len or longest
    step = GPU_STEP_TOKENS if on_gpu else max(length, CPU_STEP_TOKENS, config.max_num_seqs)
    engine = Engine(
        model=sizes,
        width=width,
        max_len=length,
        max_seqs=config.max_num_seqs,
        batch_tokens=int(config.engine_kwargs.get("max_num_batched_tokens") or step),
        tensor=config.tensor_parallel_size,
        share_bytes=round(memory * config.gpu_memory_utilization) if on_gpu and memory is not None else None,
        cache_bytes=config.kv_cache_bytes,
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
        phases = _phases(run, dict.fromkeys(roles, 1), holders, shared=len(roles) > 1)
        usable = None if capacity is None else round(USABLE * capacity)
        yield DeviceNeed(
            roles,
            f"{where} of {', '.join(roles)}" + (f" ({names})" if names else ""),
            tuple(node.name for node in nodes),
            capacity,
            usable,
            phases,
            tuple(note for role in roles for note in _notes(role, holders[role])),
            tuple(_warnings(run, phases, capacity, usable, holders, len(roles) > 1)),
        )


def _on_cpus(run: RunConfig, plan: Plan, inventory: Inventory, holders: Mapping[str, Holder]) -> Iterator[DeviceNeed]:
    """A need for each kind of machine: all ranks on it together, nothing is put aside there."""
    kinds: dict[tuple[tuple[tuple[str, int], ...], int | None], list[str]] = {}
    for node in inventory.nodes:
        here = Counter(s.role for role in holders for s in plan.roles[role] if s.node == node.name)
        if here:
            kinds.setdefault((tuple(here.items()), node.memory), []).append(node.name)
    for (ranks, memory), names in kinds.items():
        phases = _phases(run, dict(ranks), holders, shared=False)
        where = names[0] if len(names) == 1 else f"each of {len(names)} machines"
        roles = tuple(role for role, _ in ranks)
        warnings = tuple(_warnings(run, phases, memory, memory, holders, shared=False))
        yield DeviceNeed(roles, f"{where} with {', '.join(roles)}", tuple(names), memory, memory, phases, (), warnings)


def _phases(
    run: RunConfig, ranks: Mapping[str, int], holders: Mapping[str, Holder], *, shared: bool
) -> tuple[PhaseNeed, ...]:
    """What is on a device with so many ranks of each role, in every phase of a step that one of them works in."""
    found, table = [], _table(run)
    for name in _names(run, ranks, table):
        phase = table.get(name)
        uses = []
        for role, count in ranks.items():
            works = phase is None or role in phase.roles
            for part, size in _parts(holders[role], name if works else "").items():
                kind = _kind(role, holders[role], part)
                here = works and (phase is None or kind == "working" or kind in _woken(phase, role))
                if here or not (shared and _aside(run, role, kind, works=works)):
                    uses.append(Use(role, part, size * count))
        found.append(PhaseNeed(name, tuple(uses)))
    return tuple(found)


def _table(run: RunConfig) -> Mapping[str, Phase]:
    """The phases of a step; all teachers of the run, whatever their names, work in one."""
    return {**PHASES, "teacher": Phase({role: ("model",) for role in run.started if is_teacher(role)})}


def _woken(phase: Phase, role: str) -> tuple[str, ...]:
    """The kinds of parts that a phase has on the device; gradients come with the step that needs them."""
    woken = phase.wakes(role)
    return (*woken, "gradients") if "optimizer" in woken else woken


def _names(run: RunConfig, roles: Mapping[str, int], table: Mapping[str, Phase]) -> list[str]:
    options = run.algorithm.config
    skipped = {
        "logprobs": not getattr(options, "needs_logprobs", False),
        "ref_logprobs": not getattr(options, "needs_reference", False),
        "teach": not _bound(run),
    }
    possible = [name for name in ORDER if set(table[name].roles) <= set(run.roles) and not skipped.get(name)]
    return [name for name in possible if set(table[name].roles) & set(roles)] or ["running"]


def _parts(holder: Holder, phase: str) -> dict[str, int]:
    """Bytes by part in a phase that the role works in, or in others for an empty name."""
    if isinstance(holder, Trainer):
        stage = holder.largest_stage()
        found = holder.state(stage)
        if phase in ("train", "running", "logprobs", "ref_logprobs", "teach"):
            found["activations"] = holder.activations(stage, backward=phase in ("train", "running"))
        return found
    parts = holder.parts()
    if isinstance(holder, Copy) and not phase:
        del parts["activations"]
    return parts


def _kind(role: str, holder: Holder, part: str) -> str:
    """The part by the name under which turns move it; `working` is there only while the role works."""
    if part == "activations":
        return "working"
    if is_teacher(role):  # whatever runs it, its memory moves as one
        return "model"
    if isinstance(holder, Engine):
        return "weights" if part == "weights" else "kv_cache"
    return part if part in ("optimizer", "gradients") else "model"


def _aside(run: RunConfig, role: str, kind: str, *, works: bool) -> bool:
    """Whether a part leaves a shared device while it is not needed; `works`: its role does, without it."""
    placement = run.placement
    if role == "train":
        if kind == "gradients":  # dropped with whatever leaves
            return bool(placement.offload_optimizer or (placement.offload_model and not works))
        return bool(placement.offload_optimizer if kind == "optimizer" else placement.offload_model)
    if is_teacher(role):
        return bool(getattr(placement, "offload_teacher_model", False))
    return role in ("rollout", "sampler") and bool(placement.sleep_level)


def size(count: int) -> str:
    """Bytes for people."""
    if count >= GIB / 10:
        return f"{count / GIB:.3g} GiB" if count < 1000 * GIB else f"{count / GIB:,.0f} GiB"
    return f"{count / 2**20:.3g} MiB"


def _notes(role: str, holder: Holder) -> Iterator[str]:
    """How many samples a cache holds at once, where that follows from the device."""
    if isinstance(holder, Engine) and (holder.share_bytes is not None or holder.cache_bytes is not None):
        fits = holder.parts()["kv_cache"] // holder.sequence()
        if fits < holder.max_seqs:
            yield (
                f"{role}: the KV cache holds {fits} samples of the full {holder.max_len} tokens, more wait inside the "
                f"engine ({role}.max_num_seqs={holder.max_seqs})"
            )


def _warnings(
    run: RunConfig,
    phases: Sequence[PhaseNeed],
    capacity: int | None,
    usable: int | None,
    holders: Mapping[str, Holder],
    shared: bool,
) -> Iterator[str]:
    """Phases that do not fit, each with the key that lowers its largest part."""
    if capacity is None or usable is None:
        return
    for role, holder in holders.items():
        if isinstance(holder, Engine) and any(use.role == role for phase in phases for use in phase.uses):
            yield from _starved(role, holder)
    for phase in phases:
        if (over := phase.total - usable) <= 0:
            continue
        largest = sorted(phase.uses, key=lambda use: -use.bytes)
        knobs = [knob for use in largest if (knob := _knob(run, use, phase, holders[use.role], over, shared))]
        yield (
            f"{phase.name} does not fit: it needs about {size(phase.total)}, and roles may take {size(usable)} of "
            f"{size(capacity)}. " + "; ".join(knobs[:2])
        )


def _starved(role: str, engine: Engine) -> Iterator[str]:
    if engine.share_bytes is None or engine.parts()["kv_cache"] >= engine.sequence():
        return
    yield (
        f"{role}: its share of {size(engine.share_bytes)} leaves no KV cache for one sample of {engine.max_len} tokens "
        f"beside weights of {size(engine.weights())}: raise {role}.tensor_parallel_size or "
        f"{role}.gpu_memory_utilization, or lower {role}.max_model_len"
    )


def _knob(run: RunConfig, use: Use, phase: PhaseNeed, holder: Holder, over: int, shared: bool) -> str | None:
    """The key that lowers one use, with its present value or a better one."""
    role, config = use.role, run.roles[use.role].config
    takes = f"{role} {use.part.replace('_', ' ')}, {size(use.bytes)}"
    table = _table(run).get(phase.name)
    kind = _kind(role, holder, use.part)
    if shared and table is not None and kind not in _woken(table, role) and kind != "working":
        key = "sleep_level=1"
        if role == "train":
            key = "offload_optimizer=true" if kind in ("optimizer", "gradients") else "offload_model=true"
        if is_teacher(role):
            key = "offload_teacher_model=true"
        return f"{takes}: set placement.{key}"
    if isinstance(holder, Trainer):
        return _trainer_knob(config, use, holder, over, takes)
    if isinstance(holder, Engine):
        if use.part == "weights":
            return f"{takes}: raise {role}.tensor_parallel_size ({holder.tensor})"
        if use.part == "workspace":
            return f"{takes}: lower {role}.max_num_seqs ({holder.max_seqs})"
        key = "kv_cache_bytes" if config.kv_cache_bytes else "gpu_memory_utilization"
        if holder.share_bytes is None and not config.kv_cache_bytes:
            key = "max_num_seqs"
        return f"{takes}: lower {role}.{key} ({getattr(config, key)})"
    key = "max_tokens_per_micro_batch" if use.part == "activations" else "pipeline_model_parallel_size"
    return f"{takes}: {'lower' if use.part == 'activations' else 'raise'} {role}.{key} ({getattr(config, key)})"


def _trainer_knob(config: Any, use: Use, trainer: Trainer, over: int, takes: str) -> str | None:
    role = use.role
    if use.part == "activations":
        # The softmax that the head keeps has a bound of its own, all else follows from the tokens.
        tokens = math.floor(trainer.tokens * (1 - over / max(use.bytes - HEAD_BUDGET, 1)))
        if config.max_tokens_per_micro_batch is None and config.rows_per_micro_batch > 1:
            return f"{takes}: lower {role}.micro_batch_size ({config.rows_per_micro_batch})"
        if config.max_tokens_per_micro_batch is not None and tokens > trainer.tokens / 8:
            return f"{takes}: lower {role}.max_tokens_per_micro_batch ({trainer.tokens}) to about {tokens}"
        if not trainer.recompute:
            return f"{takes}: set {role}.megatron={{recompute_granularity: full, recompute_method: uniform, " + (
                "recompute_num_layers: 1}"
            )
        return f"{takes}: raise {role}.tensor_model_parallel_size ({trainer.tensor})"
    if use.part == "optimizer":
        if not trainer.distributed_optimizer and trainer.data > 1:
            return f"{takes}: set {role}.use_distributed_optimizer=true"
        if trainer.distributed_optimizer:
            return f"{takes}: raise {role}.gpus, whose data-parallel ranks divide it ({trainer.data})"
    keys = f"{role}.tensor_model_parallel_size ({trainer.tensor}) or {role}.pipeline_model_parallel_size"
    return f"{takes}: raise {keys} ({trainer.pipeline})"
