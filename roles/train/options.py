"""Settings that train roles of every backend have: ranks, the model, micro-batches, the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rolegraph.models.config import ModelConfig, folder_of
from roles.train.tuner import TunerConfig

DEFAULT_MICRO_BATCH_ROWS = 4
"""Of the longest length; as many shorter ones as `microbatch.ACTIVATION_BYTES` hold."""


@dataclass
class RanksConfig:
    """A model whose work, or whose parts, ranks share."""

    node: ClassVar[str] = "train"
    """The config's node, as messages name it."""
    at_least_one: ClassVar[tuple[str, ...]] = ("micro_batch_size", "max_tokens_per_micro_batch")
    """Keys that are null or 1 or more."""

    # Devices; one of ranks and gpus gives the other, the plan fills both.
    ranks: int | None = None
    gpus: int | None = None
    cpus: float | None = None
    """Cores a rank where the run has no GPU."""

    # The model.
    model: str | ModelConfig | None = None
    """A Hugging Face folder or name, or a choice as in `model@train.model=smollm2_135m`; null: the run's policy."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU. Gradients and optimizer state are float32 either way."""

    # Micro-batches.
    micro_batch_size: int | None = None
    """Most rows in a micro-batch; null: no bound where max_tokens_per_micro_batch is given, else as many as keep about
    512 MiB until the backward, with room for 4 of the longest rows at least."""
    max_tokens_per_micro_batch: int | None = None
    """Most tokens in a micro-batch (padded ones count unless padding_free); a longer row is refused."""
    padding_free: bool | None = None
    """Rows of a micro-batch are packed end to end instead of padded to the longest; null: true where that works."""

    seed: int | None = None
    """null: the run's."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model."""
        return folder_of(self.model, self.node)

    @property
    def rows_per_micro_batch(self) -> int | None:
        """`micro_batch_size` with its default filled in, for rows of the longest length; null is no bound on rows."""
        if self.micro_batch_size is None and self.max_tokens_per_micro_batch is None:
            return DEFAULT_MICRO_BATCH_ROWS
        return self.micro_batch_size

    def problems(self) -> list[str]:
        """What is wrong with these values, each naming its key; empty when all is well."""
        return [*self._out_of_range(), *self._conflicts()]

    def _out_of_range(self) -> list[str]:
        return [
            f"{self.node}.{name}={getattr(self, name)} must be 1 or more"
            for name in self.at_least_one
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]

    def _conflicts(self) -> list[str]:
        return []


@dataclass
class TrainConfig(TunerConfig, RanksConfig):
    """Such a model under training: what of it, and by which optimizer."""

    reference: Literal["initial"] | None = None
    """initial: keep the starting weights for `logprobs(reference=True)`: a second copy, or with adapters none, since
    they are the weights without them."""

    # The optimizer (AdamW) and its schedule.
    lr: float = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Step at which the schedule reaches min_lr; null: max_steps."""
    min_lr: float = 0.0
    weight_decay: float = 0.0
    """Of matrices; norms and biases have none."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8

    def _out_of_range(self) -> list[str]:
        found = super()._out_of_range()
        if self.decay_steps is not None and self.decay_steps < 1:
            found.append(f"train.decay_steps={self.decay_steps} must be 1 or more")
        found += [
            f"train.{name}={getattr(self, name)} must not be negative"
            for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
            if getattr(self, name) < 0
        ]
        found += [
            f"train.{name}={getattr(self, name)} must lie in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        return found

    def _conflicts(self) -> list[str]:
        found = [*super()._conflicts(), *self.tuner_problems()]
        if self.min_lr > self.lr:
            found.append(f"train.min_lr={self.min_lr} is above train.lr={self.lr}")
        return found
