"""Outcome rewards by reward functions: decodes responses once and asks the verifier pool for numbers."""

from __future__ import annotations

import threading

from rolegraph.batch import Batch
from rolegraph.errors import RewardError
from rolegraph.interfaces import Metrics, ORMRole
from rolegraph.rewards.pool import Scores, VerifierPool
from rolegraph.role import RoleContext, endpoint
from roles.orm.base import reward_columns, spread
from roles.orm.config import FunctionORMConfig
from roles.reward.reading import decoded, decoder, prompts_of, texts_of


class FunctionORM(ORMRole):
    """Scores responses with the functions of `reward`; subclass and override `rewards` to compute them otherwise."""

    Config = FunctionORMConfig
    queue_rows = 128
    """A response is judged in far less time than a call travels. The pool cuts a call into parts of
    `reward.rows_per_call` rows for all its workers, each with a deadline of its own, so long calls cost no rewards."""

    config: FunctionORMConfig

    def __init__(self, config: FunctionORMConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._rows = 0
        self._lock = threading.Lock()

    def setup(self) -> None:
        """Start the verifier pool and load the tokenizer. Raises RewardError for a function that cannot be loaded."""
        if self.config.reward is None:
            raise RewardError("no reward functions: set reward.reward_funcs (or reward=NAME)")
        if self.config.model is None:
            raise RewardError("no tokenizer to read responses with: set orm.model to the policy's folder")
        self._decode = decoder(self.config.model, skip_special_tokens=self.config.skip_special_tokens)
        self._pool = VerifierPool(self.config.reward, workers=self.context.threads)
        self._pool.start()

    def teardown(self) -> None:
        """End the worker processes."""
        if hasattr(self, "_pool"):
            self._pool.close()

    @endpoint(dispatch="queue")
    def score(self, batch: Batch) -> Batch:
        """Add the rewards, the text they are about, and for rows with faults `reward_reasons` (NAME: reason; ...)."""
        texts = self._texts(batch)
        scores = self._scores(texts, batch)
        weights = {spec.name: spec.weight for spec in self._pool.functions}
        with self._lock:
            self._rows += len(batch)
        return batch.with_columns(reward_columns(scores, weights, texts))

    def _texts(self, batch: Batch) -> list[str | None]:
        """The responses as functions see them; the sampler's own text has no special tokens."""
        if self.config.skip_special_tokens:
            return texts_of(batch, self._decode)
        if "response_ids" not in batch:
            role = self.context.role
            raise RewardError(
                f"{role}.skip_special_tokens=false needs the column response_ids, and these rows are text alone "
                f"(they have: {', '.join(sorted(batch.column_names))}): set it to true"
            )
        return decoded(batch, self._decode)

    def _scores(self, texts: list[str | None], batch: Batch) -> dict[str, Scores]:
        """Rewards of all rows: a candidate that was never drawn has none, and no function sees it."""
        drawn = [row for row, text in enumerate(texts) if text is not None]
        if len(drawn) == len(texts):
            return self.rewards([text for text in texts if text is not None], batch)
        found = self.rewards([text for text in texts if text is not None], batch.take(drawn))
        return {name: spread(scores, drawn, len(texts)) for name, scores in found.items()}

    def rewards(self, texts: list[str], batch: Batch) -> dict[str, Scores]:
        """Each function's rewards of the rows, by name."""
        available = list(dict.fromkeys(["prompts", *batch.column_names]))
        wanted = self._pool.wanted(available)
        columns = {name: batch[name].to_pylist() for name in wanted if name != "prompts"}
        if "prompts" in wanted:
            columns["prompts"] = prompts_of(batch, self._decode)
        return self._pool.score(texts, columns)

    @endpoint(lane="control")
    def metrics(self) -> Metrics:
        """Rows scored so far, and of them `faults/NAME/REASON`, the rows that function NAME gave no reward for."""
        faults = {f"faults/{name}/{reason}": float(count) for (name, reason), count in self._pool.faults().items()}
        return {"rows": float(self._rows), **faults}
