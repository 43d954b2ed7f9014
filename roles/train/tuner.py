"""What of a policy is trained, for every train backend: all weights, or low-rank adapters beside frozen ones (LoRA)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rolegraph.values import AdapterInfo

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a decoder layer, by the last part of their Hugging Face names, in their order there."""


@dataclass
class TunerConfig:
    """Keys of a train role about what it trains; mixed in before those of its backend."""

    lora_modules: ClassVar[Sequence[str] | None] = LINEAR_MODULES
    """Modules that can have an adapter; null where that depends on the model, and its backend looks itself."""

    tuner_type: Literal["full", "lora"] = "full"
    """lora: the weights of the model stay, and low-rank adapters beside its matrices are trained (arXiv:2106.09685)."""
    lora_rank: int = 16
    """Inner size of each adapter."""
    lora_alpha: float = 32.0
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""
    lora_targets: Literal["all-linear"] | list[str] = "all-linear"
    """Modules with an adapter, by the last part of their Hugging Face names, as in [q_proj,v_proj]; all-linear: every
    matrix of the decoder's layers, or where a model has experts, those outside of the blocks that hold them."""

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter that is trained; null where all weights are. `targets` are as asked for: maybe `all-linear`."""
        if self.tuner_type == "full":
            return None
        asked = ["all-linear"] if self.lora_targets == "all-linear" else list(self.lora_targets)
        if self.lora_modules is not None:
            asked = [name for name in self.lora_modules if name in asked or "all-linear" in asked]
        return AdapterInfo(self.lora_rank, self.lora_alpha, tuple(dict.fromkeys(asked)))

    def tuner_problems(self) -> list[str]:
        """What is wrong with these values, each naming its key; empty when all is well."""
        if self.tuner_type == "full":
            return [
                f"train.{field.name} has no effect with train.tuner_type=full: set train.tuner_type=lora, or remove it"
                for field in dataclasses.fields(TunerConfig)
                if field.name != "tuner_type" and getattr(self, field.name) != field.default
            ]
        found = []
        if self.lora_rank < 1:
            found.append(f"train.lora_rank={self.lora_rank} must be 1 or more")
        if self.lora_alpha <= 0:
            found.append(f"train.lora_alpha={self.lora_alpha:g} must be above 0")
        return found + self._strange_targets()

    def _strange_targets(self) -> list[str]:
        if self.lora_targets == "all-linear":
            return []
        if not self.lora_targets:
            return ["train.lora_targets=[] leaves nothing to train: name modules, or write all-linear"]
        known, found = self.lora_modules, []
        for name in self.lora_targets:
            if known is not None and name not in known:
                near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1, cutoff=0.0)
                found.append(
                    f"train.lora_targets names {name}, which is none of the modules that can have an adapter "
                    f"({', '.join(known)}); did you mean {near[0]}?"
                )
        return found
