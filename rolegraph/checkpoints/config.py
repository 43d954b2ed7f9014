"""What `checkpoint:` may say. Light imports only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run saves everything it needs to go on, and which of these checkpoints stay."""

    every: Annotated[int, Ge(1)] | None = None
    """Optimizer steps between two checkpoints, a warm start's counted too; null writes none."""
    keep_last: Annotated[int, Ge(1)] | None = 2
    """The newest that stay; null keeps all."""
    keep_best: Annotated[int, Ge(0)] = 0
    """How many stay beside those because their `metric` is best."""
    metric: str | None = None
    """A name in metrics.jsonl, as in reward/mean; of the newest step that has it."""
    best: Literal["max", "min"] = "max"
    """Whether the largest or the smallest metric is best."""
    export_hf: bool = False
    """Whether each checkpoint has a Hugging Face folder `hf` beside what resuming needs."""
