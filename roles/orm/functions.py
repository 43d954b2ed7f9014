"""Outcome rewards by reward functions: decodes responses once and asks the verifier pool for numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import RewardError
from rolegraph.interfaces import Metrics, ORMRole
from rolegraph.rewards.pool import Scores, VerifierPool, weighted
from rolegraph.role import RoleContext, endpoint
from roles.orm.config import FunctionORMConfig

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


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
        texts = self._decode(batch["response_ids"].to_pylist())
        scores = self.rewards(texts, batch)
        values = {name: found.values for name, found in scores.items()}
        weights = {spec.name: spec.weight for spec in self._pool.functions}
        reasons = [
            [f"{name}: {found.reasons[row]}" for name, found in scores.items() if found.reasons[row]]
            for row in range(len(batch))
        ]
        with self._lock:
            self._rows += len(batch)
        return batch.with_columns(
            {
                **{f"rewards/{name}": pa.array(found, pa.float64()) for name, found in values.items()},
                **{f"reward_faults/{name}": pa.array(found.codes, pa.int8()) for name, found in scores.items()},
                "reward": pa.array(weighted(values, weights), pa.float64()),
                "reward_faults": pa.array(map(len, reasons), pa.int32()),
                "reward_reasons": pa.array(["; ".join(found) or None for found in reasons], pa.string()),
                "response_text": pa.array(texts, pa.string()),
            }
        )

    def rewards(self, texts: list[str], batch: Batch) -> dict[str, Scores]:
        """Each function's rewards of the rows, by name."""
        available = list(dict.fromkeys(["prompts", "response_ids", *batch.column_names]))
        wanted = self._pool.wanted(available)
        columns = {name: batch[name].to_pylist() for name in wanted if name != "prompts"}
        if "prompts" in wanted:
            columns["prompts"] = self._prompts(batch)
        return self._pool.score(texts, columns)

    def _prompts(self, batch: Batch) -> list[Any]:
        """What the policy was asked: chat messages, else text."""
        for name in ("messages", "prompt"):
            if name in batch:
                return list(batch[name].to_pylist())
        return list(self._decode(batch["prompt_ids"].to_pylist()))

    @endpoint(lane="control")
    def metrics(self) -> Metrics:
        """Rows scored so far, and of them `faults/NAME/REASON`, the rows that function NAME gave no reward for."""
        faults = {f"faults/{name}/{reason}": float(count) for (name, reason), count in self._pool.faults().items()}
        return {"rows": float(self._rows), **faults}


def decoder(model: str, *, skip_special_tokens: bool) -> Decode:
    """From token ids to text by the tokenizer of a Hugging Face folder or name."""
    file = Path(model).expanduser() / "tokenizer.json"
    if file.is_file():
        # Read by itself this takes a moment; through transformers it would import torch.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: tokenizer.decode_batch(list(ids), skip_special_tokens=skip_special_tokens)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model)
    return lambda ids: slow.batch_decode([list(row) for row in ids], skip_special_tokens=skip_special_tokens)
