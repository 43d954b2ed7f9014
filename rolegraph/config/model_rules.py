"""Rules between the config and the model's own config.json, as far as that can be read before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolegraph.config.eval_sets import completion_length
from rolegraph.config.schema import RunConfig
from rolegraph.models.architecture import UnknownArchitectureError, positions, read_config
from rolegraph.models.config import ModelConfig
from rolegraph.role import is_teacher


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


@dataclass(frozen=True)
class Room:
    """The longest sequence a role computes with, as the keys that it follows from."""

    parts: tuple[tuple[str, int], ...]
    drawn: int = 0
    """Tokens that an engine has to draw after what it scores."""

    @property
    def tokens(self) -> int:
        """All of it."""
        return sum(value for _, value in self.parts) + self.drawn

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.parts]
        return " + ".join(words + ([f"{self.drawn} (the engine draws a token to score)"] if self.drawn else []))


def room(run: RunConfig, role: str) -> Room | None:
    """What a role must have room for; null for one that reads no more than rows of the dataset.

    And for one that reads texts of its own making: what is too long for it is the fault of a row.
    A teacher reads samples and dataset responses, with the prompt that a row brings for it where it has one; engines
    and the trainer read the rows of eval sets as well.
    """
    if getattr(run.roles[role].config, "reads_text", False):
        return None
    trained, evaluated = _room_in_training(run, role), list(_rooms_of_eval_sets(run, role))
    if trained is None and role == "train" and evaluated:
        trained = Room((("data.max_length", run.data.max_length),))
    return max([*filter(None, [trained]), *evaluated], key=lambda each: each.tokens, default=None)


def _rooms_of_eval_sets(run: RunConfig, role: str) -> Iterator[Room]:
    for name, each in run.eval.sets.items():
        prompt = (f"eval.sets.{name}.data.max_length", each.data.max_length)
        if role == "train" and each.loss:
            yield Room((prompt,))
        longest = completion_length(run, each)
        if role == "rollout" and each.samples and longest is not None:
            is_own = each.max_completion_length is not None
            key = f"eval.sets.{name}" if is_own else "algorithm"
            yield Room((prompt, (f"{key}.max_completion_length", longest)))


def _room_in_training(run: RunConfig, role: str) -> Room | None:
    data, longest = run.data, getattr(run.algorithm.config, "max_completion_length", None)
    completion = None if longest is None else ("algorithm.max_completion_length", int(longest))
    prompt = ("data.max_length", data.max_length)
    if not is_teacher(role):
        return None if completion is None else Room((prompt, completion))
    drawn = getattr(run.roles[role].config, "drawn_tokens", 0)
    sequences: list[tuple[tuple[str, int], ...]] = [(prompt,)]
    own = ("data.max_teacher_prompt_length", data.teacher_prompt_limit)
    if data.max_teacher_prompt_length is not None:
        sequences.append((own, prompt))  # a response that shares `max_length` with another prompt
    if completion is not None and "rollout" in run.roles:
        sequences = [] if getattr(run.algorithm.config, "data_needs", None) == "prompt" else sequences
        sequences.append((own if own[1] > prompt[1] else prompt, completion))
    return max((Room(sequence, drawn) for sequence in sequences), key=lambda each: each.tokens)


def positions_suffice(run: RunConfig) -> Iterator[str]:
    """The model tells apart as many positions as the longest row has tokens."""
    told: set[str] = set()
    for role, sizes in _sizes(run, (*SPREAD, "max_model_len", "lr_schedule")):
        most = positions(sizes)
        if most is None:
            continue
        model = model_of(run, role)
        name = model.path or model.maker or "the model"
        given = getattr(run.roles[role].config, "max_model_len", None)
        if given is not None and given > most:
            yield f"{role}.max_model_len={given} is more than the {most} positions of {name}: set it to null"
        if getattr(run.roles[role].config, "reads_text", False):
            continue
        need = room(run, role) or Room((("data.max_length", run.data.max_length),))
        if need.tokens <= most or name in told:
            continue
        told.add(name)
        several = len(need.parts) > 1
        total = f" = {need.tokens}" if several or need.drawn else ""
        advice = "lower one of them" if several else f"lower it to {most - need.drawn}"
        yield (
            f"{need}{total} tokens are more than the {most} positions of {name} (max_position_embeddings): {advice}, "
            "or choose another model"
        )


def sizes_divide(run: RunConfig) -> Iterator[str]:
    """Attention heads, layers and experts divide over the ranks that share them."""
    for role, sizes in _sizes(run, SPREAD):
        config = run.roles[role].config
        yield from _heads(role, run.roles[role].config, sizes)
        for key, name, what in (
            ("pipeline_model_parallel_size", "num_hidden_layers", "layers"),
            ("expert_model_parallel_size", "num_experts", "experts"),
        ):
            size, count = max(getattr(config, key, 1), 1), _number(sizes, name)
            if size > 1 and name == "num_experts" and not (count := count or _number(sizes, "num_local_experts")):
                yield f"{role}.{key}={size}, and the model has no experts: set it to 1"
            elif count and count % size:
                yield _indivisible(f"{role}.{key}={size}", count, f"{what} ({name})", _divisors(count))


def experts_are_whole(run: RunConfig) -> Iterator[str]:
    """Adapters are beside dense matrices: the mesh that spreads experts has none for those."""
    for role, sizes in _sizes(run, ("expert_model_parallel_size",)):
        config = run.roles[role].config
        experts = _number(sizes, "num_experts") or _number(sizes, "num_local_experts")
        if experts and getattr(config, "adapter", None):
            yield (
                f"{role}.tuner_type=lora: the model has {experts} experts, which have no adapters here: set "
                f"{role}.tuner_type=full, or choose a dense model"
            )


def _heads(role: str, config: Any, sizes: Mapping[str, Any]) -> Iterator[str]:
    heads = _number(sizes, "num_attention_heads")
    kv_heads = _number(sizes, "num_key_value_heads") or heads
    if not heads:
        return
    for key, is_engine in (("tensor_model_parallel_size", False), ("tensor_parallel_size", True)):
        size = max(getattr(config, key, 1), 1)  # less than that is reported elsewhere
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


SPREAD = ("tensor_model_parallel_size", "tensor_parallel_size")
"""Keys of roles that cut the model up."""


def _sizes(run: RunConfig, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """config.json of every role that has one of these keys and whose model can be read here."""
    for role, spec in run.roles.items():
        if any(hasattr(spec.config, key) for key in keys):
            try:
                sizes = read_config(model_of(run, role))
            except UnknownArchitectureError:
                continue
            yield role, sizes.get("text_config") or sizes
