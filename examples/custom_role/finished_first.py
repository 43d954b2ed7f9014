"""A rollout that draws spare responses and prefers those that came to an end: a role with a config of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rolegraph.batch import Batch
from rolegraph.interfaces import SamplingParams
from rolegraph.role import endpoint
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.vllm import VLLMRollout


@dataclass(frozen=True, kw_only=True)
class FinishedFirstConfig(VLLMRolloutConfig):
    """The settings of the vLLM rollout, and one more."""

    spare: int = 2
    """Responses drawn for each prompt beyond those asked for."""

    def problems(self) -> list[str]:
        """What is wrong with these settings taken together; shown before anything starts."""
        below = [f"rollout.spare={self.spare} must be at least 0"] if self.spare < 0 else []
        return [*super().problems(), *below]


class FinishedFirst(VLLMRollout):
    """Of `n + spare` responses a prompt it keeps n: finished ones before cut-off ones, in the order drawn."""

    Config = FinishedFirstConfig
    config: FinishedFirstConfig

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """`sampling.n` rows a prompt, like the base class, which does the work."""
        drawn_per_prompt = sampling.n + self.config.spare
        drawn = VLLMRollout.generate(self, prompts, replace(sampling, n=drawn_per_prompt))
        cut_off = np.array([reason != "stop" for reason in drawn["finish_reason"].to_pylist()])
        order = np.argsort(cut_off.reshape(-1, drawn_per_prompt), axis=1, kind="stable")
        first = np.sort(order[:, : sampling.n], axis=1) + np.arange(len(prompts))[:, None] * drawn_per_prompt
        repeat = np.tile(np.arange(sampling.n, dtype=np.int32), len(prompts))
        return drawn.take(first.ravel()).with_columns({"repeat": repeat})
