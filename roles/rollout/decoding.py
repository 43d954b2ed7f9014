"""Drawing a batch of samples with a causal model of transformers, a token of each at a time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roles.rollout.engine import Sample
from roles.rollout.manifest import incomplete

if TYPE_CHECKING:
    from roles.rollout.draws import Draws
    from roles.rollout.kv_room import KVRoom

PREFILL_TOKENS = 8192
"""Tokens of prompts in one forward pass, padding counted; a longer prompt is a pass of its own."""
POLL_S = 0.05
"""Between two looks whether weights are whole again."""


class Forward:
    """A causal model of transformers, called as its own `generate` calls it."""

    def __init__(self, model: Any, *, compiled: bool = False) -> None:
        """`compiled`: a step of one token runs as transformers compiles it."""
        known = inspect.signature(model.forward).parameters
        self.model = model
        self._cache_key = "cache_params" if "cache_params" in known else "past_key_values"
        self._has_positions = "position_ids" in known
        # Else the logits of all prompt tokens would be made, and all but the last dropped.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._step = model.get_compiled_call(None) if compiled else model
        self.device: torch.device = model.get_input_embeddings().weight.device

    def __call__(self, ids: Tensor, pads: Tensor | None, cache: Any, new: int) -> Tensor:
        """[rows, vocabulary] logits behind the last token.

        ids: [rows, tokens], of which the last `new` are not in the cache yet; pads: [rows] how many of the first are
        padding, null where none is.
        """
        inputs: dict[str, Any] = {self._cache_key: cache, "use_cache": True, **self._last_only}
        if pads is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            inputs["attention_mask"] = (places >= pads[:, None]).long()
        if self._has_positions:
            last = torch.arange(ids.shape[1] - new, ids.shape[1], device=ids.device)
            inputs["position_ids"] = (last - (0 if pads is None else pads[:, None])).clamp(min=0).view(-1, new)
        is_first = new == ids.shape[1]
        given = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, is_first_iteration=is_first, **inputs
        )
        logits: Tensor = (self.model if new > 1 else self._step)(**given, return_dict=True).logits
        return logits[:, -1]


class Gate:
    """Passed by one at a time, in the order of their coming: a lock alone would let a loop in again and again."""

    def __init__(self) -> None:
        self._next, self._inside = Lock(), Lock()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """The block has the engine for itself."""
        with self._next:
            self._inside.acquire()
        try:
            yield
        finally:
            self._inside.release()


@dataclass
class Weights:
    """What a batch asks about the weights before every step."""

    version: int = 0
    changes: int = 0
    """How often they were written, under a new version or the same."""
    torn: str | None = None
    """Why they are partly new and partly old."""
    awaited_until: float = 0.0
    """How long samples wait then for the next sync; as `time.monotonic` counts."""
    gate: Gate = field(default_factory=Gate)
    """Held while the model computes, and while its weights change."""

    @contextmanager
    def whole(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """The block has the engine for itself, and weights of one version; or nobody wants samples any more.

        After a sync that broke off it waits for the next. Raises WeightSyncError where none comes in time.
        """
        while True:
            with self.gate.passed():
                if self.torn is None or not is_wanted():
                    yield
                    return
                if time.monotonic() >= self.awaited_until:
                    raise incomplete(self.torn)
            time.sleep(POLL_S)


@dataclass(frozen=True)
class Work:
    """The samples of a batch."""

    prompts: Sequence[Sequence[int]]
    """Different ones."""
    sources: Sequence[int]
    """The prompt of each sample."""
    uniforms: np.ndarray[Any, Any]
    """[samples, max_tokens] numbers from [0, 1) to draw with."""
    ends: Sequence[int]
    """Ids that end a sample, and stay in it."""

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def length(self) -> int:
        """Tokens of the longest sample, prompt included."""
        most: int = self.uniforms.shape[1]
        return self.width + most


class Decoding:
    """One batch on its way. Rows are its living samples: one that has ended makes room, and costs nothing more.

    A prompt is computed once for its samples. Prompts are padded on their left, so that all rows are as long at any
    time. When the weights change between two steps, the sequences so far are computed anew.

    With a `fixed` room no shape changes from the first step to the last, and samples that have ended stay.
    """

    def __init__(
        self, forward: Forward, weights: Weights, draws: Draws, work: Work, make_room: Callable[[], KVRoom]
    ) -> None:
        self._forward, self._weights, self._draws, self._make_room = forward, weights, draws, make_room
        self._room = make_room()
        self._width = work.width
        self._ends = np.asarray(sorted(set(work.ends)), dtype=np.int64)
        samples, self._most = work.uniforms.shape
        device = forward.device
        self._ids = left_padded(work.prompts, self._width, self._most).to(device)
        self._set_pads(np.asarray([self._width - len(prompt) for prompt in work.prompts]))
        self._uniforms = torch.from_numpy(work.uniforms).to(device)
        self._sources = np.asarray(work.sources)
        self._rows = np.arange(samples)
        """The sample of each row, once the prompts are computed."""
        self._computed: int | None = None
        """The changes of the weights before the cache was computed."""
        self._tokens = np.zeros((samples, self._most), dtype=np.int32)
        self._logprobs = np.zeros((samples, self._most), dtype=np.float32)
        self._lengths = np.zeros(samples, dtype=np.int64)
        self._versions = np.full((samples, 2), weights.version, dtype=np.int64)
        self._is_stopped = np.zeros(samples, dtype=bool)
        self._is_done = np.zeros(samples, dtype=bool)

    def run(self, is_wanted: Callable[[], bool], ended: Callable[[int], None]) -> list[Sample]:
        """Draw until all samples have ended, or are not wanted any more; `ended` hears how many have.

        Raises WeightSyncError where a sync broke off meanwhile, and none has come since.
        """
        for step in range(self._most):
            with self._weights.whole(is_wanted), torch.no_grad():
                if not is_wanted():
                    break
                before = self._is_done.sum()
                self._record(step, *self._draws(self._logits(step), self._uniforms[:, step]))
                ended(int(self._is_done.sum() - before))
                if self._is_done.all():
                    break
                self._leave()
        return self._samples()

    def _logits(self, step: int) -> Tensor:
        """[rows, vocabulary] of the next token."""
        total = self._width + step
        if self._computed == self._weights.changes:
            return self._forward(self._ids[:, :total], self._pads, self._room.cache, 1)
        is_first, self._computed = self._computed is None, self._weights.changes
        if is_first and not self._room.can_share:
            self._reorder(self._sources)
        if not is_first and not self._room.can_fill_in_parts:
            self._room = self._make_room()
        logits = self._fill(total)
        if is_first and self._room.can_share:
            self._reorder(self._sources)
            self._room.take(torch.from_numpy(self._sources).to(self._ids.device))
            logits = logits[torch.from_numpy(self._sources).to(logits.device)]
        return logits

    def _fill(self, total: int) -> Tensor:
        """Compute the first `total` tokens of all rows, as many rows at once as a pass may have."""
        count = len(self._ids)
        at_once = max(1, PREFILL_TOKENS // total) if self._room.can_fill_in_parts else count
        found = []
        for first in range(0, count, at_once):
            self._room.begin(first)
            part = slice(first, first + at_once)
            pads = None if self._pads is None else self._pads[part]
            found.append(self._forward(self._ids[part, :total], pads, self._room.cache, total))
        self._room.whole()
        return torch.cat(found)

    def _record(self, step: int, tokens: Tensor, logprobs: Tensor) -> None:
        self._ids[:, self._width + step] = tokens.to(self._ids.device)
        drawn, values = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()  # in one copy
        is_alive = ~self._is_done[self._rows]
        samples, drawn = self._rows[is_alive], drawn[is_alive].astype(np.int64)
        self._tokens[samples, step] = drawn
        self._logprobs[samples, step] = values[is_alive]
        self._lengths[samples] = step + 1
        self._versions[samples, 1] = self._weights.version
        if step == 0:
            self._versions[samples, 0] = self._weights.version
        self._is_stopped[samples] = np.isin(drawn, self._ends)
        self._is_done[samples] = self._is_stopped[samples] | (step + 1 == self._most)

    def _leave(self) -> None:
        """Let the last rows take the places of those that have ended."""
        is_done = self._is_done[self._rows]
        if not self._room.can_share or is_done.sum() < self._room.least_leaving(len(is_done)):
            return
        order = np.arange(len(is_done) - is_done.sum())
        order[is_done[: len(order)]] = np.nonzero(~is_done)[0][len(order) - is_done[: len(order)].sum() :]
        self._rows = self._rows[order]
        self._reorder(order)
        self._room.take(torch.from_numpy(order).to(self._ids.device))
        self._uniforms = self._uniforms[torch.from_numpy(order).to(self._uniforms.device)]

    def _reorder(self, order: np.ndarray[Any, Any]) -> None:
        self._ids = self._ids[torch.from_numpy(order).to(self._ids.device)]
        self._set_pads(self._pad_counts[order])

    def _set_pads(self, counts: np.ndarray[Any, Any]) -> None:
        """How many tokens of each row are padding; without any, attention needs no mask."""
        self._pad_counts = counts
        self._pads = torch.from_numpy(counts).to(self._ids.device) if counts.any() else None

    def _samples(self) -> list[Sample]:
        reasons = np.where(self._is_stopped, "stop", np.where(self._lengths == self._most, "length", "abort"))
        return [
            Sample(tokens[:length].tolist(), logprobs[:length].tolist(), str(reason), int(first), int(last))
            for tokens, logprobs, length, reason, (first, last) in zip(
                self._tokens, self._logprobs, self._lengths, reasons, self._versions, strict=True
            )
        ]


def left_padded(prompts: Sequence[Sequence[int]], width: int, more: int) -> Tensor:
    """[prompts, width + more] token ids, with room behind them."""
    ids = torch.zeros((len(prompts), width + more), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) : width] = torch.as_tensor(prompt, dtype=torch.long)
    return ids
