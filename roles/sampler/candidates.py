"""Which candidates of which rows are to be drawn, and the columns of those that could not be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, TurnError
from rolegraph.interfaces import SamplingParams
from roles.rollout.drawing import sample_seed, token_columns


@dataclass(frozen=True)
class Candidates:
    """Rows of a batch, each as often as candidates of it are wanted."""

    rows: Batch
    """A row a candidate, without `repeats`."""
    source: list[int]
    """The row of the batch it belongs to."""
    repeats: list[int]
    seeds: list[int | None]
    step: int

    @classmethod
    def of(cls, batch: Batch, sampling: SamplingParams) -> Candidates:
        """Those that the column `repeats` names, else `sampling.n` a row.

        Seeds do not depend on `sampling.step`: a candidate that is drawn later is the same. Raises BatchError, naming
        the uid, for repeats that are no such numbers.
        """
        uids: list[str] = batch["uid"].to_pylist()
        named = _named(batch, uids) if "repeats" in batch else [range(_checked(sampling).n)] * len(batch)
        source = [row for row, repeats in enumerate(named) for _ in repeats]
        repeats = [repeat for each in named for repeat in each]
        base = sampling.seed
        seeds = [
            None if base is None else sample_seed(base, uids[row], 0, repeat)
            for row, repeat in zip(source, repeats, strict=True)
        ]
        return cls(batch.drop(["repeats"]).take(source), source, repeats, seeds, sampling.step)

    def __len__(self) -> int:
        return len(self.repeats)

    def by_row(self) -> Iterator[tuple[int, list[int]]]:
        """Rows of the batch, each with the indices of its candidates."""
        for row, indices in groupby(range(len(self)), key=self.source.__getitem__):
            yield row, list(indices)

    def drawn(
        self,
        texts: Sequence[str | None],
        reasons: Sequence[str],
        faults: Sequence[str | None],
        **more: Any,
    ) -> Batch:
        """The candidates with what every sampler says of them, and further columns."""
        return self.rows.with_columns(
            {
                "repeat": np.asarray(self.repeats, dtype=np.int32),
                "step": np.full(len(self), self.step, dtype=np.int32),
                "response_text": pa.array(texts, pa.string()),
                "finish_reason": pa.array(reasons, pa.string()),
                "sample_fault": pa.array(faults, pa.string()),
                **more,
            }
        )

    def with_tokens(
        self,
        drawn: Sequence[tuple[Sequence[int], Sequence[float], str]],
        faults: Sequence[str | None],
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
    ) -> Batch:
        """The candidates as tokens, their logprobs and why they ended: with a fault none, and `error`."""
        texts = decode([tokens for tokens, _, _ in drawn])
        return self.drawn(
            [None if fault else text for text, fault in zip(texts, faults, strict=True)],
            [reason for _, _, reason in drawn],
            faults,
            **token_columns(self.rows, [(tokens, logprobs) for tokens, logprobs, _ in drawn]),
        )


def refuse_level_2(role: str, level: int) -> None:
    """TurnError for a sleep that drops the weights."""
    if level == 2:
        raise TurnError(
            f"{role}.sleep(level=2) would drop weights that nobody brings back: set placement.sleep_level=1"
        )


def _checked(sampling: SamplingParams) -> SamplingParams:
    if sampling.n < 1:
        raise BatchError(f"sampling.n={sampling.n}: at least one candidate a row")
    return sampling


def _named(batch: Batch, uids: Sequence[str]) -> list[list[int]]:
    named = [repeats.tolist() for repeats in batch.lists("repeats")]
    for uid, repeats in zip(uids, named, strict=True):
        if len(set(repeats)) < len(repeats) or min(repeats, default=0) < 0:
            raise BatchError(f"row {uid}: repeats={repeats} must be different numbers from 0")
    return named
