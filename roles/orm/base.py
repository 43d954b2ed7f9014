"""What outcome rewards do alike: responses to texts, scores to columns."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.interfaces import Metrics, ORMRole
from rolegraph.rewards.pool import Scores, weighted
from rolegraph.role import RoleContext, endpoint
from roles.reward.reading import policy_decoder, prompts_of, texts_of


class OneScoreConfig(Protocol):
    """What every outcome reward with one score needs to know."""

    @property
    def name(self) -> str:
        """The column is `rewards/NAME`."""

    @property
    def policy(self) -> str | None:
        """Folder whose tokenizer turns response ids into text."""


class OneScoreORM(ORMRole):
    """An outcome reward with one score a response; subclasses say what some responses are worth."""

    config: OneScoreConfig

    def __init__(self, config: OneScoreConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._rows = 0
        self._faults: Counter[str] = Counter()
        self._lock = threading.Lock()

    def setup(self) -> None:
        """Load the tokenizer that turns response ids into text."""
        self._decode = policy_decoder(self.context.role, self.config.policy)

    def scores(self, prompts: list[Any], texts: list[str], batch: Batch) -> Scores:
        """A number a row, or None with the reason why not: one of `FAULT_REASONS`, and after a colon what came."""
        raise NotImplementedError

    @endpoint(dispatch="queue")
    def score(self, batch: Batch) -> Batch:
        """See `ORMRole.score`; of one score, `reward` is the same."""
        texts = texts_of(batch, self._decode)
        drawn = [row for row, text in enumerate(texts) if text is not None]
        found = Scores([], [])
        if drawn:
            rows = batch if len(drawn) == len(texts) else batch.take(drawn)
            prompts = prompts_of(rows, self._decode)
            found = self.scores(prompts, [text for text in texts if text is not None], rows)
        scores = spread(found, drawn, len(texts))
        reasons = [reason.partition(":")[0] for reason in scores.reasons if reason]
        with self._lock:
            self._rows += len(batch)
            self._faults.update(reasons)
        return batch.with_columns(reward_columns({self.config.name: scores}, {self.config.name: 1.0}, texts))

    @endpoint(lane="control")
    def metrics(self) -> Metrics:
        """Rows scored so far, and of them `faults/NAME/REASON`, those without a score."""
        with self._lock:
            faults = {f"faults/{self.config.name}/{why}": float(count) for why, count in self._faults.items()}
            return {"rows": float(self._rows), **faults}


def spread(scores: Scores, rows: Sequence[int], count: int) -> Scores:
    """The scores of some `rows` among all `count`; the others have none, for they have no response."""
    spread = Scores([None] * count, ["no_response"] * count)
    for place, row in enumerate(rows):
        spread.values[row], spread.reasons[row] = scores.values[place], scores.reasons[place]
    return spread


def reward_columns(
    scores: Mapping[str, Scores], weights: Mapping[str, float], texts: Sequence[str | None]
) -> dict[str, pa.Array]:
    """The columns that `ORMRole.score` adds, from the scores by name."""
    values = {name: found.values for name, found in scores.items()}
    reasons = [
        [f"{name}: {found.reasons[row]}" for name, found in scores.items() if found.reasons[row]]
        for row in range(len(texts))
    ]
    return {
        **{f"rewards/{name}": pa.array(found, pa.float64()) for name, found in values.items()},
        **{f"reward_faults/{name}": pa.array(found.codes, pa.int8()) for name, found in scores.items()},
        "reward": pa.array(weighted(values, weights), pa.float64()),
        "reward_faults": pa.array(map(len, reasons), pa.int32()),
        "reward_reasons": pa.array(["; ".join(found) or None for found in reasons], pa.string()),
        "response_text": pa.array(texts, pa.string()),
    }


def finite(scores: Scores) -> Scores:
    """A number that is none (a model in half precision may overflow) is no score."""
    for row, value in enumerate(scores.values):
        if value is not None and not math.isfinite(value):
            scores.values[row], scores.reasons[row] = None, "not_finite"
    return scores
