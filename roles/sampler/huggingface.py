"""Candidates drawn by transformers: any causal language model, a batch of candidates at a time."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

from rolegraph.batch import Batch
from rolegraph.interfaces import SamplerRole, SamplingParams
from rolegraph.role import RoleContext, endpoint
from roles.reward.reading import decoder
from roles.rollout.drawing import Drawn
from roles.rollout.transformers_engine import TransformersEngine
from roles.sampler.candidates import Candidates, refuse_level_2
from roles.sampler.config import HuggingFaceSamplerConfig


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
        self._engine = TransformersEngine(config, context)

    def setup(self) -> None:
        """Load the model."""
        self._engine.start()
        self._decode = decoder(self.config.folder, skip_special_tokens=True)

    @endpoint(dispatch="queue")
    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        """See `SamplerRole.sample`. Raises TurnError while asleep."""
        self._engine.slumber.refuse_samples()
        wanted = Candidates.of(batch, sampling)
        prompts = batch.lists("prompt_ids")
        why = [self._engine.why_not(prompt, sampling) for prompt in prompts]
        faults = [why[row] for row in wanted.source]
        drawn: list[tuple[list[int], list[float], str]] = [([], [], "error")] * len(wanted)
        good = [index for index, fault in enumerate(faults) if fault is None]
        asked = [
            Drawn(prompts[row].tolist(), [wanted.seeds[index] for index in indices])
            for row, indices in groupby(good, key=wanted.source.__getitem__)
        ]
        for index, sample in zip(good, self._engine.draw(asked, sampling), strict=True):
            drawn[index] = (list(sample.token_ids), list(sample.logprobs), sample.finish_reason)
        return wanted.with_tokens(drawn, faults, self._decode)

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `SamplerRole.sleep`: the weights move to host memory. On a CPU there is nothing to give."""
        refuse_level_2(self.context.role, level)
        self._engine.sleep(level)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `SamplerRole.wake_up`; the cache takes its memory as it is needed."""
        self._engine.wake_up(parts)
