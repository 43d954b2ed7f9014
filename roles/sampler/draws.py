"""One token a candidate from the logits of a step, each by the candidate's own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rolegraph.interfaces import SamplingParams


class Draws(LogitsProcessor):
    """Chooses the tokens of a batch in place of transformers' own sampling, which has one generator for all rows.

    It leaves transformers a single token with a finite score. The cuts come in vLLM's order: temperature, min_p, top_k,
    top_p.
    """

    def __init__(self, sampling: SamplingParams, uniforms: Tensor, limit: int) -> None:
        """`uniforms`: [rows, steps] numbers from [0, 1); ids from `limit` on are never drawn."""
        self._sampling = sampling
        self._uniforms = uniforms
        self._limit = limit
        self._warpers = [
            *([MinPLogitsWarper(sampling.min_p)] if sampling.min_p > 0 else []),
            *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []),
            *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        ]
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[rows, vocabulary] scores that leave one token a row."""
        logits = scores.float().clone()
        logits[:, self._limit :] = -torch.inf
        if self._sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = logits / self._sampling.temperature
            for warper in self._warpers:
                logits = warper(input_ids, logits)
            tokens = choose(logits.softmax(-1), self._uniforms[:, len(self._tokens)].to(logits.device))
        self._tokens.append(tokens)
        self._logprobs.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def responses(self, ends: Sequence[int]) -> list[tuple[list[int], list[float], str]]:
        """Tokens, logprobs (nats) and finish reason of each row, up to the first of `ends`, which stays in it."""
        tokens = torch.stack(self._tokens, 1).cpu()
        logprobs = torch.stack(self._logprobs, 1).cpu()
        is_end = torch.isin(tokens, torch.tensor(list(ends), dtype=tokens.dtype))
        found = []
        for row in range(len(tokens)):
            at = is_end[row].nonzero()
            length = int(at[0]) + 1 if len(at) else tokens.shape[1]
            reason = "stop" if len(at) else "length"
            found.append((tokens[row, :length].tolist(), logprobs[row, :length].tolist(), reason))
        return found


def choose(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] the token that each row's number from [0, 1) falls on, in the order of the ids.

    probabilities: [rows, vocabulary]. In float64: sums of float32 over a vocabulary would lose the unlikely tokens.
    """
    sums = probabilities.double().cumsum(-1)
    at = torch.searchsorted(sums, uniforms.double()[:, None] * sums[:, -1:], right=True)
    # Rounding could lead past the last token that has a probability.
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(at, last)[:, 0]
