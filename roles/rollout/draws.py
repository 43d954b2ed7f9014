"""One token a sample from the logits of a step, each by the sample's own random numbers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rolegraph.interfaces import SamplingParams


class Draws:
    """Chooses tokens as vLLM does, whose cuts come in this order: temperature, min_p, top_k, top_p."""

    def __init__(self, sampling: SamplingParams, limit: int) -> None:
        """Ids from `limit` on are never drawn."""
        self._temperature = sampling.temperature
        self._limit = limit
        self._warpers: list[Any] = [
            *([MinPLogitsWarper(sampling.min_p)] if sampling.min_p > 0 else []),
            *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []),
            *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        ]

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """A token a row, and its logprob (nats) in the distribution that it was drawn from.

        logits: [rows, vocabulary]; uniforms: [rows] numbers from [0, 1).
        """
        logits = logits[:, : self._limit].float()
        if self._temperature == 0:
            tokens = logits.argmax(-1)
            return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        logits = logits / self._temperature
        for warper in self._warpers:
            logits = warper(cast(Any, None), logits)  # none of these looks at earlier tokens
        logprobs = logits.log_softmax(-1)
        tokens = choose(logprobs.exp(), uniforms)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def choose(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] the token that each row's number from [0, 1) falls on, in the order of the ids.

    probabilities: [rows, vocabulary]. In float64: sums of float32 over a vocabulary would lose the unlikely tokens.
    """
    sums = probabilities.double().cumsum(-1)
    at = torch.searchsorted(sums, uniforms.double()[:, None] * sums[:, -1:], right=True)
    # Rounding could lead past the last token that has a probability.
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(at, last)[:, 0]
