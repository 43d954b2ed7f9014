"""From the last hidden states of a model of transformers to its logits: more than a projection in some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCALES = {"logit_scale": 1.0, "logits_scaling": -1.0}
"""Config fields that scale logits, and the power to which they do (Cohere multiplies, Granite divides)."""
PROBE_TOKENS = 8


@dataclass(frozen=True)
class HeadRule:
    """Logits are cap(scale * (states @ weight.T + bias)), where cap(x) = soft_cap * tanh(x / soft_cap)."""

    scale: float
    soft_cap: float | None


def head_rule(model: Any) -> HeadRule:
    """What the config of a causal model says of its logits."""
    settings = model.config.get_text_config()
    scale = 1.0
    for name, power in SCALES.items():
        scale *= float(getattr(settings, name, None) or 1.0) ** power
    return HeadRule(scale, getattr(settings, "final_logit_softcapping", None))


def probe(vocab_size: int) -> Tensor:
    """[1, PROBE_TOKENS] a sequence to compare logits on."""
    import torch

    return torch.arange(PROBE_TOKENS)[None] % vocab_size


def mismatch(theirs: Tensor, ours: Tensor) -> float | None:
    """How far two tensors of logits are apart, where that is more than rounding; null where they agree."""
    error = float((theirs.float() - ours.float()).abs().max())
    return error if error > 0.02 * (1.0 + float(theirs.float().abs().max())) else None
