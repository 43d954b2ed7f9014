"""Candidates drawn by transformers: any causal language model, a batch of candidates at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.interfaces import SamplerRole, SamplingParams
from rolegraph.models.architecture import positions
from rolegraph.role import RoleContext, endpoint
from roles.frozen import FrozenModel
from roles.reward.reading import decoder
from roles.rollout import arguments
from roles.rollout.slumber import Slumber
from roles.sampler.candidates import Candidates, refuse_level_2
from roles.sampler.config import HuggingFaceSamplerConfig

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

Drawn = tuple[list[int], list[float], str]
"""Tokens, their logprobs (nats), and why they ended."""


class HuggingFaceSampler(SamplerRole):
    """A replica. Draws and logprobs follow the rules of vLLM's (see `DrawingEngine`), so one can stand for the other.

    A prompt that is empty, has ids the model lacks, or leaves no room for `sampling.max_tokens` among the model's
    positions is the fault of its candidates.
    """

    Config: ClassVar[type[HuggingFaceSamplerConfig]] = HuggingFaceSamplerConfig
    config: HuggingFaceSamplerConfig
    queue_rows: ClassVar[int] = 16
    queue_in_flight: ClassVar[int] = 1

    def __init__(self, config: HuggingFaceSamplerConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._slumber = Slumber()

    def setup(self) -> None:
        """Load the model."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        config = self.config
        self._frozen = FrozenModel(AutoModelForCausalLM, config.folder, config.dtype, self.context, spread=True)
        self._model: Any = self._frozen.model
        # A folder's own temperature, penalties and so on would act beside ours.
        self._model.generation_config = GenerationConfig()
        self._vocabulary = arguments.vocabulary_size(config.folder)
        self._limit = arguments.tokenizer_size(config.folder) or self._vocabulary
        self._eos = arguments.eos_token_ids(config.folder)
        # Some families call them otherwise in config.json; the loaded config knows.
        most: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._positions = positions(arguments.model_config(config.folder)) or most
        self._decode = decoder(config.folder, skip_special_tokens=True)
        self._free = np.random.default_rng(
            [self.context.seed if config.seed is None else config.seed, self.context.rank]
        )

    @endpoint(dispatch="queue")
    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        """See `SamplerRole.sample`. Raises TurnError while asleep."""
        self._slumber.refuse_samples()
        wanted = Candidates.of(batch, sampling)
        prompts = batch.lists("prompt_ids")
        why = [self._why_not(prompt, sampling) for prompt in prompts]
        faults = [why[row] for row in wanted.source]
        drawn: list[Drawn] = [([], [], "error")] * len(wanted)
        good = [index for index, fault in enumerate(faults) if fault is None]
        for part in self._parts(good, [len(prompts[row]) for row in wanted.source]):
            asked = [prompts[wanted.source[index]] for index in part]
            for index, one in zip(part, self._draw(asked, [wanted.seeds[i] for i in part], sampling), strict=True):
                drawn[index] = one
        return wanted.with_tokens(drawn, faults, self._decode)

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `SamplerRole.sleep`: the weights move to host memory. On a CPU there is nothing to give."""
        refuse_level_2(self.context.role, level)
        if self._slumber.begin(level):
            self._frozen.move(away=True)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `SamplerRole.wake_up`; the cache takes its memory as it is needed."""
        waking = self._slumber.to_wake(parts)
        if "weights" in waking:
            self._frozen.move(away=False)
        self._slumber.woke(waking)

    def _why_not(self, prompt: np.ndarray[Any, Any], sampling: SamplingParams) -> str | None:
        if not len(prompt):
            return "the prompt is empty"
        if self._positions is not None and len(prompt) + sampling.max_tokens > self._positions:
            return (
                f"a prompt of {len(prompt)} tokens and max_tokens={sampling.max_tokens} exceed the model's "
                f"{self._positions} positions; lower one of them"
            )
        return arguments.strange_token_id("prompt", prompt, self._vocabulary)

    def _parts(self, indices: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """Candidates to draw at once: those of like length, the longest first, which shows early what memory takes."""
        ordered = sorted(indices, key=lambda index: (-lengths[index], index))
        for start in range(0, len(ordered), self.config.max_num_seqs):
            yield ordered[start : start + self.config.max_num_seqs]

    def _draw(
        self, prompts: Sequence[np.ndarray[Any, Any]], seeds: Sequence[int | None], sampling: SamplingParams
    ) -> list[Drawn]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        from roles.sampler.draws import Draws

        ends = sorted({*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._eos)})
        generators = [self._free if seed is None else np.random.default_rng(seed) for seed in seeds]
        uniforms = np.stack([generator.random(sampling.max_tokens) for generator in generators])
        draws = Draws(sampling, torch.from_numpy(uniforms), self._limit)
        input_ids, mask = _left_padded(prompts)
        device = self._model.get_input_embeddings().weight.device
        with torch.no_grad():
            self._model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=LogitsProcessorList([draws]),
                generation_config=GenerationConfig(
                    max_new_tokens=sampling.max_tokens,
                    do_sample=False,  # the processor leaves one token to choose
                    eos_token_id=ends or None,
                    pad_token_id=0,
                    use_cache=True,
                    cache_implementation="static" if self.config.cache == "static" else None,
                ),
            )
        return draws.responses(ends)


def _left_padded(prompts: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, Tensor]:
    """[rows, longest] token ids, and which of them are there."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    return ids, mask
