"""A model of transformers that draws from prompts: what the rollout and the sampler have in common."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rolegraph.errors import ConfigError, TurnError
from rolegraph.interfaces import SamplingParams
from rolegraph.models.architecture import positions
from rolegraph.role import RoleContext
from roles.frozen import FrozenModel
from roles.rollout import arguments
from roles.rollout.drawing import Drawn
from roles.rollout.huggingface_config import HuggingFaceDrawingConfig
from roles.rollout.slumber import Slumber

if TYPE_CHECKING:
    from roles.rollout.decoding import Work
    from roles.rollout.engine import Sample
    from roles.rollout.kv_room import KVRoom

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

CPU_CACHE_PART = 8
"""Of the free memory of a machine without GPUs, for the keys and values of a batch."""
OWN_CACHES = ("reformer", "xlnet", "rwkv", "xlstm")
"""Families of models with another cache than transformers' own, which knows of no padding."""


class TransformersEngine:
    """One replica's model, its sleep, and what the model says of its tokens.

    Draws and logprobs follow the rules of vLLM's (see `DrawingEngine`), so one can stand for the other. A sample with a
    seed is the same whatever is drawn beside it, up to rounding.
    """

    def __init__(self, config: HuggingFaceDrawingConfig, context: RoleContext) -> None:
        self.config = config
        self.context = context
        self.slumber = Slumber()
        self._said: set[str] = set()
        self._one_call = threading.Lock()
        self._count = threading.Lock()
        self._running = 0
        """Samples that were asked for and have not ended."""
        self._aborts = 0
        self._room: KVRoom | None = None

    def start(self, max_model_len: int | None = None) -> None:
        """Load the model. Raises ConfigError for one that cannot be drawn from here."""
        from transformers import AutoModelForCausalLM

        from roles.rollout.decoding import Forward, Weights
        from roles.rollout.kv_room import KVRoom

        config = self.config
        kind = str(arguments.model_config(config.folder).get("model_type", ""))
        if kind.startswith(OWN_CACHES):
            raise ConfigError(
                f"{self.context.role}.model={config.folder}: models of type {kind} have a cache of their own, from "
                "which a batch cannot be drawn; choose another model"
            )
        self.frozen = FrozenModel(AutoModelForCausalLM, config.folder, config.dtype, self.context, spread=True)
        self.model: Any = self.frozen.model
        self.weights = Weights()
        self._is_fixed = config.cache == "static"
        self._forward = Forward(self.model, compiled=self._is_fixed and self.context.device == "cuda")
        self._vocabulary = arguments.vocabulary_size(config.folder)
        self._limit = arguments.tokenizer_size(config.folder) or self._vocabulary
        self._eos = arguments.eos_token_ids(config.folder)
        # Some families call them otherwise in config.json; the loaded config knows.
        most: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self._positions = positions(arguments.model_config(config.folder)) or most
        self._max_model_len = max_model_len
        self._fills_in_parts = KVRoom(self.model.config, 1, 1, fixed=self._is_fixed).can_fill_in_parts
        self._token_bytes = max(1, _cache_bytes_per_token(self.model))
        self._cache_bytes = config.kv_cache_bytes or self._free_bytes()
        self._free = np.random.default_rng(
            [self.context.seed if config.seed is None else config.seed, self.context.rank]
        )

    def why_not(self, prompt: Array, sampling: SamplingParams) -> str | None:
        """Why nothing can be drawn from this prompt; null where it can."""
        wanted = len(prompt) + sampling.max_tokens
        what = f"a prompt of {len(prompt)} tokens and max_tokens={sampling.max_tokens} exceed"
        if not len(prompt):
            return "the prompt is empty"
        if self._max_model_len is not None and wanted > self._max_model_len:
            role = self.context.role
            return f"{what} max_model_len={self._max_model_len}; raise {role}.max_model_len or lower data.max_length"
        if self._positions is not None and wanted > self._positions:
            return f"{what} the model's {self._positions} positions; lower one of them"
        return arguments.strange_token_id("prompt", prompt, self._vocabulary)

    def draw(self, wanted: Sequence[Drawn], sampling: SamplingParams) -> list[Sample]:
        """The samples, prompt after prompt. Safe to call from several threads; one call computes at a time.

        Raises WeightSyncError where a sync broke off meanwhile, or before, and none has come since.
        """
        from roles.rollout.decoding import Decoding, Work
        from roles.rollout.draws import Draws

        owners = [index for index, one in enumerate(wanted) for _ in one.seeds]
        seeds = [seed for one in wanted for seed in one.seeds]
        found: list[Sample | None] = [None] * len(owners)
        draws = Draws(sampling, self._limit)
        ends = sorted({*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._eos)})
        aborts = self._aborts
        with self._counted(len(owners)) as ended, self._one_call:
            for part in self._parts([len(wanted[owner].prompt) for owner in owners], owners, sampling.max_tokens):
                prompts = list(dict.fromkeys(owners[index] for index in part))
                work = Work(
                    prompts=[wanted[owner].prompt for owner in prompts],
                    sources=[prompts.index(owners[index]) for index in part],
                    uniforms=self._uniforms([seeds[index] for index in part], sampling.max_tokens),
                    ends=ends,
                )
                decoding = Decoding(self._forward, self.weights, draws, work, partial(self._room_for, work))
                samples = decoding.run(lambda: self._aborts == aborts, ended)
                for index, sample in zip(part, samples, strict=True):
                    found[index] = sample
        return [sample for sample in found if sample is not None]

    def abort(self) -> int:
        """End all running samples with what they have; returns how many. Waits for the step in progress."""
        with self.weights.gate.passed(), self._count:
            self._aborts += 1
            return self._running

    def sleep(self, level: int) -> None:
        """See `RolloutRole.sleep`; raises TurnError while samples are being drawn.

        On a CPU, level 1 keeps the weights where they are.
        """
        if running := self._running:
            raise TurnError(f"{running} samples are being drawn: await them, or abort them, before sleep")
        if not self.slumber.begin(level):
            return
        self._room = None
        if level == 2:
            self.frozen.drop()
        else:
            self.frozen.move(away=True)

    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `RolloutRole.wake_up`; the cache takes its memory as it is needed."""
        waking = self.slumber.to_wake(parts)
        if "weights" in waking:
            self.frozen.move(away=False)
        self.slumber.woke(waking)

    def say_once(self, level: int, text: str) -> None:
        """Log what is no news the second time."""
        if text not in self._said:
            self._said.add(text)
            log.log(level, text)

    @contextmanager
    def _counted(self, count: int) -> Iterator[Any]:
        left = count

        def ended(number: int) -> None:
            nonlocal left
            with self._count:
                left -= number
                self._running -= number

        with self._count:
            self._running += count
        try:
            yield ended
        finally:
            ended(left)

    def _parts(self, lengths: Sequence[int], owners: Sequence[int], more: int) -> Iterator[list[int]]:
        """Samples to draw at once: those of like length, the longest first, which shows early what memory takes."""
        from roles.rollout.decoding import PREFILL_TOKENS

        ordered = sorted(range(len(lengths)), key=lambda index: (-lengths[index], owners[index], index))
        start = 0
        while start < len(ordered):
            width = lengths[ordered[start]]
            rows = min(self.config.max_num_seqs, self._cache_bytes // (self._token_bytes * (width + more)))
            if not self._fills_in_parts:
                rows = min(rows, PREFILL_TOKENS // width)
            stop = start + max(1, rows)
            yield ordered[start:stop]
            start = stop

    def _room_for(self, work: Work) -> KVRoom:
        """Memory for a batch: that of an earlier one where it suffices."""
        from roles.rollout.kv_room import KVRoom

        rows = len(work.sources)
        if self._room is None or not self._room.has_room(rows, work.length):
            self._room = None  # before the new one takes its place
            self._room = KVRoom(self.model.config, rows, work.length, fixed=self._is_fixed)
        return self._room

    def _uniforms(self, seeds: Sequence[int | None], count: int) -> Array:
        generators = [self._free if seed is None else np.random.default_rng(seed) for seed in seeds]
        return np.stack([generator.random(count) for generator in generators])

    def _free_bytes(self) -> int:
        """What a batch's keys and values may take."""
        if self.context.device != "cuda":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // CPU_CACHE_PART
        import torch

        share = self.config.gpu_memory_utilization or 0.9
        devices = range(torch.cuda.device_count())
        total = sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
        taken = sum(torch.cuda.memory_allocated(device) for device in devices)
        # A step's logits are there several times over, some of them in double precision.
        step = self.config.max_num_seqs * self._vocabulary * 32
        return max(0, int(share * total) - taken - step)


def _cache_bytes_per_token(model: Any) -> int:
    """What a token leaves in the cache of a model with plain attention; others need less."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return int(2 * config.num_hidden_layers * key_heads * head_dim * model.dtype.itemsize)
