"""A sampler and a reward role that take their time, for runs that are killed meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.interfaces import ORMRole, SamplerRole, SamplingParams


@dataclass(frozen=True, kw_only=True)
class SlowConfig:
    """Seconds that a call takes."""

    never_on_gpu: ClassVar[bool] = True
    seconds: float = 0.03
    ranks: int = 1


class SlowSampler(SamplerRole):
    """Says what follows from the row and the repeat."""

    queue_rows = 2

    Config = SlowConfig
    config: SlowConfig

    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        time.sleep(self.config.seconds)
        wanted = batch["repeats"].to_pylist() if "repeats" in batch else [range(sampling.n)] * len(batch)
        which = [(row, repeat) for row, repeats in enumerate(wanted) for repeat in repeats]
        asked = [chat[-1]["content"] for chat in batch["messages"].to_pylist()]
        texts = [f"{asked[row]}, and {sampling.seed} {repeat}" * (1 + repeat) for row, repeat in which]
        columns = {
            "repeat": np.array([repeat for _, repeat in which], np.int32),
            "step": np.zeros(len(which), np.int32),
            "response_text": texts,
            "finish_reason": ["stop"] * len(which),
            "response_length": np.array([len(text) for text in texts], np.int32),
            "sample_fault": pa.nulls(len(which), pa.string()),
        }
        return batch.drop(["repeats"]).take([row for row, _ in which]).with_columns(columns)


class SlowORM(ORMRole):
    """1 for a response of an even length."""

    queue_rows = 8

    Config = SlowConfig
    config: SlowConfig

    def score(self, batch: Batch) -> Batch:
        time.sleep(self.config.seconds)
        rewards = [float(len(text) % 2 == 0) for text in batch["response_text"].to_pylist()]
        columns = {
            "rewards/even": np.array(rewards),
            "reward_faults/even": np.zeros(len(rewards), np.int8),
            "reward": np.array(rewards),
            "reward_faults": np.zeros(len(rewards), np.int32),
            "reward_reasons": pa.nulls(len(rewards), pa.string()),
        }
        return batch.with_columns(columns)
