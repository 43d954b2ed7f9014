"""What `eval:` may say. Light imports only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """Prompts, how they are answered, and what the answers are measured by."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the policy is evaluated, and on what."""

    every: Annotated[int, Ge(1)] | None = None
    """Optimizer steps between two evaluations, beside those at step 0 and at the end; null evaluates never."""
    sets: Mapping[str, EvalSetConfig] = field(default_factory=dict)
    """By name; metrics are called eval/NAME/...."""
