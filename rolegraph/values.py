"""What the endpoints of the roles are given and give beside batches: plain values, small and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Metrics = dict[str, float]
PolicyWeights = Literal["current", "initial", "average"]
"""Weights that a train role can compute with: of now, of the start, or a moving average."""
StepReduce = Literal["min", "mean", "last"]
"""How the scores of a response's steps become one number."""


@dataclass(frozen=True)
class SamplingParams:
    """How a rollout draws tokens; the names are those of vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the end-of-sequence ids of the model."""
    ignore_eos: bool = False
    seed: int | None = None
    """Base of the per-sample seeds: one value names the same draws on every machine; null draws freely."""
    step: int = 0
    """The generation step, part of every sample's seed, written to the `step` column."""


@dataclass(frozen=True)
class LossSpec:
    """A loss as the config names it: an import path and its keyword arguments (plain values only)."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadInfo:
    """What a model does with its last hidden states, beside the weight it multiplies them with."""

    vocab_size: int
    """Rows of the weight that are tokens; further ones are padding."""
    hidden_size: int
    dtype: str
    """Of the weight and the hidden states as they travel: float32, or bfloat16 (as uint16 of the same bits)."""
    scale: float = 1.0
    """Logits are multiplied by it."""
    soft_cap: float | None = None
    """Logits become soft_cap * tanh(logits / soft_cap), after scaling."""


@dataclass(frozen=True)
class TensorInfo:
    """One weight as it travels from trainer to engine, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AdapterInfo:
    """A low-rank adapter beside frozen weights (LoRA, arXiv:2106.09685): W + alpha / rank * B A."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The modules that have one, by the last part of their Hugging Face names, as PEFT's `target_modules`."""


@dataclass(frozen=True)
class TransferGroup:
    """Where the ranks of one weight-sync process group meet.

    The sending rank is 0; the workers of each living replica follow, `offsets[r]` being the rank of replica r's first.
    """

    backend: str
    """gloo, nccl or ipc."""
    host: str
    port: int
    world_size: int
    offsets: Mapping[int, int]
    timeout_s: float


FAULT_REASONS = (
    "timeout",
    "crash",
    "exception",
    "not_a_list",
    "wrong_length",
    "none",
    "not_a_number",
    "not_finite",
    "unparsable",
    "no_reply",
    "no_response",
    "too_long",
    "other",
)
"""Why a reward function gave no reward for a row; a number in a column `reward_faults/NAME` is 1 + the index here."""
