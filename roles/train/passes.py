"""What the trainer's code asks of a backend: groups of ranks, passes over micro-batches, the output head, a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.interfaces import PolicyWeights
from rolegraph.losses.heads import Head
from roles.train.packing import MicroBatch

Finish = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""From a micro-batch and its hidden states to a loss, and whatever is wanted of it."""


@dataclass(frozen=True)
class Layout:
    """How a backend wants its micro-batches."""

    padding_free: bool
    share_prompts: bool = False
    multiple_of: int = 1
    """What the tokens of a row (packed: of all rows) are rounded up to."""
    token_bytes: int = 1
    """What a token keeps on a rank until the backward, roughly."""


class Passes(ABC):
    """A model on this rank; every rank takes part in each call of `run`, `head` and `on_every_stage`."""

    device: torch.device
    dtype: torch.dtype
    """What the model computes in."""
    vocab_size: int
    data_group: dist.ProcessGroup
    """The ranks that rows are cut over."""
    vocab_group: dist.ProcessGroup | None = None
    """The ranks that hold equal parts of the vocabulary, in their order; null: each holds all of it."""
    loss_copies: int = 1
    """Ranks that compute the whole loss of the same rows, and whose gradients are added up."""
    last_stage: bool = True
    """Whether this rank sees hidden states and losses."""
    layout: Layout

    @abstractmethod
    def run(self, micro_batches: Iterator[MicroBatch], count: int, finish: Finish, *, train: bool) -> list[Any]:
        """What `finish` returned for each of `count` micro-batches, on the last stage.

        With `train`, gradients are afterwards those of the sum of all losses, over all ranks.
        """

    @abstractmethod
    def predicting(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """[tokens, h] the states that predict each response token, from what `run` gave `finish`."""

    @abstractmethod
    def head(self) -> Head:
        """The output head, or this rank's rows of it; gradients reach the weight. Last stage only."""

    def on_every_stage(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the last stage, on all stages."""
        return make()


class Learner(Passes):
    """A model under training."""

    @abstractmethod
    def head_of(self, weights: PolicyWeights) -> Head:
        """The head of a set of weights that the policy keeps, in `dtype`; last stage only, all of its ranks together.

        Raises RoleGraphError where that set is not kept.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """Of all gradients on all ranks; called once after each pass that trains, before anything is done to them."""

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""

    @abstractmethod
    def apply(self, rate: float) -> None:
        """Step the optimizer at this learning rate."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the optimizer's moments and its count of steps."""
