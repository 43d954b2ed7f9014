"""Settings that all roles with a model of transformers have which nobody trains there. Light, as all configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """Copies of a model, each of which holds all of it."""

    replicas: int | None = None
    """Copies of the model; each is one actor. Null: derived from `gpus`, or 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Devices of all replicas together."""
    cpus: float | None = None
    """Cores a replica on a CPU; fractions allowed. Null: derived from the plan."""
    dtype: DType = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
