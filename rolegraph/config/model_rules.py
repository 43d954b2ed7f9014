"""Rules between the config and the model's own config.json, as far as that can be read before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolegraph.config.schema import RunConfig
from rolegraph.models.architecture import UnknownArchitectureError, positions, read_config
from rolegraph.models.config import ModelConfig


def model_of(run: RunConfig, role: str) -> ModelConfig:
    """The model a role computes with: its own where it names one, else the policy."""
    own = getattr(run.roles[role].config, "model", None)
    if isinstance(own, ModelConfig):
        return own
    return ModelConfig(path=own) if own else run.model


def context_length(run: RunConfig) -> int | None:
    """Tokens of the longest prompt and response together; null when the algorithm draws no responses."""
    longest = getattr(run.algorithm.config, "max_completion_length", None)
    return None if longest is None else run.data.max_length + int(longest)


def positions_suffice(run: RunConfig) -> Iterator[str]:
    """The model tells apart as many positions as the longest row has tokens."""
    need = context_length(run)
    told: set[str] = set()
    for role, sizes in _sizes(run):
        most = positions(sizes)
        if most is None:
            continue
        model = model_of(run, role)
        name = model.path or model.maker or "the model"
        given = getattr(run.roles[role].config, "max_model_len", None)
        if given is not None and given > most:
            yield f"{role}.max_model_len={given} is more than the {most} positions of {name}: set it to null"
        if name in told:
            continue
        told.add(name)
        where = f"tokens are more than the {most} positions of {name} (max_position_embeddings)"
        if need is None and run.data.max_length > most:
            yield f"data.max_length={run.data.max_length} {where}: lower it to {most}, or choose another model"
        if need is not None and need > most:
            yield (
                f"data.max_length={run.data.max_length} + algorithm.max_completion_length="
                f"{need - run.data.max_length} = {need} {where}: lower one of them, or choose another model"
            )


def sizes_divide(run: RunConfig) -> Iterator[str]:
    """Attention heads, layers and experts divide over the ranks that share them."""
    for role, sizes in _sizes(run):
        config = run.roles[role].config
        yield from _heads(role, run.roles[role].config, sizes)
        for key, name, what in (
            ("pipeline_model_parallel_size", "num_hidden_layers", "layers"),
            ("expert_model_parallel_size", "num_experts", "experts"),
        ):
            size, count = getattr(config, key, 1), _number(sizes, name)
            if size > 1 and name == "num_experts" and not (count := count or _number(sizes, "num_local_experts")):
                yield f"{role}.{key}={size}, and the model has no experts: set it to 1"
            elif count and count % size:
                yield _indivisible(f"{role}.{key}={size}", count, f"{what} ({name})", _divisors(count))


def _heads(role: str, config: Any, sizes: Mapping[str, Any]) -> Iterator[str]:
    heads = _number(sizes, "num_attention_heads")
    kv_heads = _number(sizes, "num_key_value_heads") or heads
    if not heads:
        return
    for key, is_engine in (("tensor_model_parallel_size", False), ("tensor_parallel_size", True)):
        size = getattr(config, key, 1)
        # An engine copies a key head to several ranks; the trainer does not.
        fits = [each for each in _divisors(heads) if kv_heads % each == 0 or (is_engine and each % kv_heads == 0)]
        if heads % size:
            yield _indivisible(f"{role}.{key}={size}", heads, "attention heads (num_attention_heads)", fits)
        elif size not in fits:
            yield _indivisible(f"{role}.{key}={size}", kv_heads, "key and value heads (num_key_value_heads)", fits)


def _indivisible(given: str, count: int, what: str, fits: Sequence[int]) -> str:
    return f"{given} does not divide the model's {count} {what}: choose one of {', '.join(map(str, fits))}"


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _number(sizes: Mapping[str, Any], name: str) -> int:
    return int(sizes.get(name) or 0)


def _sizes(run: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """config.json of every role that computes with a model and whose model can be read here."""
    for role, spec in run.roles.items():
        if hasattr(spec.config, "tensor_model_parallel_size") or hasattr(spec.config, "tensor_parallel_size"):
            try:
                sizes = read_config(model_of(run, role))
            except UnknownArchitectureError:
                continue
            yield role, sizes.get("text_config") or sizes
