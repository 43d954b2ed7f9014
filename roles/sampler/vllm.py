"""Candidates drawn by vLLM: one engine a replica, tensor parallelism inside it."""

from __future__ import annotations

from typing import ClassVar

from rolegraph.batch import Batch
from rolegraph.interfaces import SamplerRole, SamplingParams
from rolegraph.role import RoleContext, endpoint
from roles.reward.reading import decoder
from roles.rollout.drawing import DrawingEngine, Drawn
from roles.sampler.candidates import Candidates, refuse_level_2
from roles.sampler.config import VLLMSamplerConfig


class VLLMSampler(SamplerRole):
    """A replica; its draws and logprobs are those of `DrawingEngine`, the rollout's engine.

    A prompt that is empty, has ids the model lacks, or leaves no room for `sampling.max_tokens` within `max_model_len`
    is the fault of its candidates.
    """

    Config: ClassVar[type[VLLMSamplerConfig]] = VLLMSamplerConfig
    config: VLLMSamplerConfig
    queue_rows: ClassVar[int] = 4
    queue_rows_alone: ClassVar[int] = 16
    """Rows of a call: with 32 calls in flight an engine is full, even of rows with one candidate each."""

    def __init__(self, config: VLLMSamplerConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._engine = DrawingEngine(config, context)

    def setup(self) -> None:
        """Start the engine."""
        self._engine.start()
        self._decode = decoder(self.config.folder, skip_special_tokens=True)

    def teardown(self) -> None:
        """Stop the engine and its worker processes."""
        self._engine.close()

    @endpoint(dispatch="queue")
    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        """See `SamplerRole.sample`; safe to call from many threads at once. Raises TurnError while asleep."""
        self._engine.slumber.refuse_samples()
        wanted = Candidates.of(batch, sampling)
        prompts = batch.lists("prompt_ids")
        faults: list[str | None] = [None] * len(wanted)
        rows: list[Drawn] = []
        for row, indices in wanted.by_row():
            why = self._engine.why_not(prompts[row], sampling)
            if why is None:
                rows.append(Drawn(prompts[row].tolist(), [wanted.seeds[index] for index in indices]))
            for index in indices:
                faults[index] = why
        samples = iter(self._engine.draw(rows, sampling))
        drawn = []
        for fault in faults:
            sample = None if fault else next(samples)
            drawn.append((sample.token_ids, sample.logprobs, sample.finish_reason) if sample else ([], [], "error"))
        return wanted.with_tokens(drawn, faults, self._decode)

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `SamplerRole.sleep` and `DrawingEngine.sleep`."""
        refuse_level_2(self.context.role, level)
        self._engine.sleep(level)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `SamplerRole.wake_up` and `DrawingEngine.wake_up`."""
        self._engine.wake_up(parts)
