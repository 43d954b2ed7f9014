"""What to do where a plan needs more memory than a device has: the key that lowers the largest parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolegraph.config.schema import RunConfig
from rolegraph.needs import PhaseNeed, Use, kind_of, table_of, woken
from rolegraph.placement.memory import HEAD_BUDGET, Engine, Holder, Sharded, Trainer
from rolegraph.placement.shares import MOVABLE
from rolegraph.role import family

GIB = 2**30


def size(count: int) -> str:
    """Bytes for people."""
    if count >= GIB / 10:
        return f"{count / GIB:.3g} GiB" if count < 1000 * GIB else f"{count / GIB:,.0f} GiB"
    return f"{count / 2**20:.3g} MiB"


def notes(role: str, holder: Holder) -> Iterator[str]:
    """What of a model is trained, where not all of it is, and how many samples a cache holds at once."""
    if isinstance(holder, Trainer) and holder.adapter_rank:
        adapters, whole = holder.adapter_parameters(), sum(holder.parameters(0))
        yield (
            f"{role}: trains adapters of rank {holder.adapter_rank} ({', '.join(holder.adapter_targets)}), "
            f"{adapters / 1e6:.3g} M parameters a rank beside {whole / 1e6:.3g} M that stay"
        )
    if isinstance(holder, Engine) and (holder.share_bytes is not None or holder.cache_bytes is not None):
        fits = holder.parts()["kv_cache"] // holder.sequence()
        if fits < holder.max_seqs:
            yield (
                f"{role}: the KV cache holds {fits} samples of the full {holder.max_len} tokens, more wait inside the "
                f"engine ({role}.max_num_seqs={holder.max_seqs})"
            )


def warnings(
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
        f"beside weights of {size(engine.weights())}: raise {role}.{engine.split_by} or "
        f"{role}.gpu_memory_utilization, or lower {role}.max_model_len"
    )


def _knob(run: RunConfig, use: Use, phase: PhaseNeed, holder: Holder, over: int, shared: bool) -> str | None:
    """The key that lowers one use, with its present value or a better one."""
    role, config = use.role, run.roles[use.role].config
    takes = f"{role} {use.part.replace('_', ' ')}, {size(use.bytes)}"
    table = table_of(run).get(phase.name)
    kind = kind_of(role, holder, use.part)
    if shared and table is not None and kind not in woken(table, role) and kind != "working":
        key = MOVABLE[family(role)]["optimizer" if kind == "gradients" else kind]
        return f"{takes}: set placement.{key}={'1' if key == 'sleep_level' else 'true'}"
    if isinstance(holder, Trainer):
        return _trainer_knob(config, use, holder, over, takes)
    if isinstance(holder, Engine):
        if use.part == "weights":
            return f"{takes}: raise {role}.{holder.split_by} ({holder.tensor})"
        if use.part == "workspace":
            return f"{takes}: lower {role}.max_num_seqs ({holder.max_seqs})"
        key = "kv_cache_bytes" if config.kv_cache_bytes else "gpu_memory_utilization"
        if holder.share_bytes is None and not config.kv_cache_bytes:
            key = "max_num_seqs"
        return f"{takes}: lower {role}.{key} ({getattr(config, key)})"
    if use.part == "activations":
        return f"{takes}: lower {role}.max_tokens_per_micro_batch ({config.max_tokens_per_micro_batch})"
    pipeline = getattr(config, "pipeline_model_parallel_size", None)
    if pipeline is None:
        return f"{takes}: choose a smaller model ({role}.model), or devices with more memory"
    return f"{takes}: raise {role}.pipeline_model_parallel_size ({pipeline})"


def _trainer_knob(config: Any, use: Use, trainer: Trainer, over: int, takes: str) -> str | None:
    role = use.role
    if use.part == "activations":
        # The softmax that the head keeps has a bound of its own, all else follows from the tokens.
        tokens = math.floor(trainer.tokens * (1 - over / max(use.bytes - HEAD_BUDGET, 1)))
        if config.max_tokens_per_micro_batch is None and config.rows_per_micro_batch > 1:
            return f"{takes}: lower {role}.micro_batch_size ({config.rows_per_micro_batch})"
        if config.max_tokens_per_micro_batch is not None and tokens > trainer.tokens / 8:
            return f"{takes}: lower {role}.max_tokens_per_micro_batch ({trainer.tokens}) to about {tokens}"
        if isinstance(trainer, Sharded):
            return _sharded_knob(use, trainer, takes)
        if not trainer.recompute:
            return f"{takes}: set {role}.megatron={{recompute_granularity: full, recompute_method: uniform, " + (
                "recompute_num_layers: 1}"
            )
        return f"{takes}: raise {role}.tensor_model_parallel_size ({trainer.tensor})"
    if isinstance(trainer, Sharded):
        return _sharded_knob(use, trainer, takes)
    if use.part == "optimizer":
        if not trainer.distributed_optimizer and trainer.data > 1:
            return f"{takes}: set {role}.use_distributed_optimizer=true"
        if trainer.distributed_optimizer:
            return f"{takes}: raise {role}.gpus, whose data-parallel ranks divide it ({trainer.data})"
    keys = f"{role}.tensor_model_parallel_size ({trainer.tensor}) or {role}.pipeline_model_parallel_size"
    return f"{takes}: raise {keys} ({trainer.pipeline})"


def _sharded_knob(use: Use, trainer: Sharded, takes: str) -> str:
    """Of a trainer whose ranks share all state, beside the size of a micro-batch."""
    if use.part == "activations" and not trainer.recompute:
        return f"{takes}: set {use.role}.gradient_checkpointing=true"
    if use.part == "gradients" and trainer.micro_batches > 1 and not trainer.reduces_each:
        return f"{takes}: set {use.role}.reduce_each_micro_batch=true"
    return f"{takes}: raise {use.role}.gpus, which share it ({trainer.data})"
