"""Token batches for tests: made of rows, and cut into micro-batches that add up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rolegraph.losses.types import LossOutput, Reduce, Stat, TokenBatch, Totals


@dataclass
class Row:
    """One response; every list has an entry a token."""

    logprobs: list[float]
    mask: list[int] | None = None
    per_token: dict[str, list[float]] = field(default_factory=dict)
    per_row: dict[str, float] = field(default_factory=dict)

    @property
    def flags(self) -> list[int]:
        return self.mask if self.mask is not None else [1] * len(self.logprobs)


def totals(rows: Sequence[Row]) -> Totals:
    counts = [sum(row.flags) for row in rows]
    return Totals(torch.tensor(float(sum(counts))), torch.tensor(float(sum(c > 0 for c in counts))))


def flat(rows: Sequence[Row], name: str) -> Tensor:
    return torch.tensor([x for row in rows for x in row.per_token[name]], dtype=torch.float64)


def batch(rows: Sequence[Row], over: Totals | None = None, logprobs: Tensor | None = None) -> TokenBatch:
    """The rows as a token batch, in float64, with the denominators of `over` (or their own)."""
    if logprobs is None:
        logprobs = torch.tensor([x for row in rows for x in row.logprobs], dtype=torch.float64, requires_grad=True)
    columns = {name: flat(rows, name) for name in (rows[0].per_token if rows else {})}
    for name in rows[0].per_row if rows else {}:
        columns[name] = torch.tensor([row.per_row[name] for row in rows], dtype=torch.float64)
    return TokenBatch(
        logprobs=logprobs,
        mask=torch.tensor([x for row in rows for x in row.flags], dtype=torch.float64),
        row=torch.tensor([i for i, row in enumerate(rows) for _ in row.logprobs], dtype=torch.int64),
        rows=len(rows),
        columns=columns,
        totals=over or totals(rows),
        entropy=columns.get("entropy"),
    )


def prepared(loss: Any, parts: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The rows of each rank after `prepare`, run as ranks do: every reduction spans all of them."""
    if not hasattr(loss, "prepare"):
        return [list(part) for part in parts]
    every = [batch(part) for part in parts]
    whole: list[Row] = []
    for part, tokens in zip(parts, every, strict=True):
        starts = torch.tensor([0] + [len(r.logprobs) for r in part]).cumsum(0).tolist()
        columns = loss.prepare(tokens, recorded_reduce(loss, every))
        for i, row in enumerate(part):
            extra = {name: values[starts[i] : starts[i + 1]].tolist() for name, values in columns.items()}
            whole.append(Row(row.logprobs, row.mask, {**row.per_token, **extra}, row.per_row))
    ends = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).tolist()
    return [whole[a:b] for a, b in pairwise(ends)]


def recorded_reduce(loss: Any, every: Sequence[TokenBatch]) -> Reduce:
    """Reductions over ranks without threads: the k-th reduction of each rank is replayed until all are known."""
    known: list[list[Tensor]] = []

    class PendingError(Exception):
        pass

    def replay(tokens: TokenBatch) -> list[Tensor]:
        asked: list[Tensor] = []

        def ask(kind: str) -> Callable[[Tensor], Tensor]:
            def reduce(value: Tensor) -> Tensor:
                asked.append(value)
                if len(asked) > len(known):
                    raise PendingError
                return combine(kind, known[len(asked) - 1])

            return reduce

        with suppress(PendingError):
            loss.prepare(tokens, Reduce(sum=ask("sum"), max=ask("max"), gather=ask("gather")))
        return asked

    while True:
        asked = [replay(tokens) for tokens in every]
        if len(asked[0]) == len(known):
            break
        known.append([values[-1] for values in asked])
    calls = iter(range(len(known)))

    def answer(kind: str) -> Callable[[Tensor], Tensor]:
        return lambda value: combine(kind, known[next(calls)])

    return Reduce(sum=answer("sum"), max=answer("max"), gather=answer("gather"))


def combine(kind: str, values: list[Tensor]) -> Tensor:
    if kind == "gather":
        return torch.cat(values)
    stacked = torch.stack(values)
    return stacked.sum(0) if kind == "sum" else stacked.amax(0)


@dataclass
class Result:
    loss: float
    gradient: list[float]
    metrics: dict[str, float]


def run(loss: Any, parts: Sequence[Sequence[Row]], *, prepare: bool = True) -> Result:
    """What the trainer does: prepare, one call a part, shares added up, metrics reduced."""
    over = totals([row for part in parts for row in part])
    outputs: list[LossOutput] = []
    gradients: list[Tensor] = []
    for part in prepared(loss, parts) if prepare else parts:
        tokens = batch(part, over)
        output = loss(tokens)
        output.loss.backward()
        outputs.append(output)
        assert tokens.logprobs.grad is not None
        gradients.append(tokens.logprobs.grad)
    return Result(
        sum(float(o.loss.detach()) for o in outputs),
        torch.cat(gradients).tolist(),
        reduced([o.stats for o in outputs]),
    )


def reduced(stats: Sequence[Mapping[str, Stat]]) -> dict[str, float]:
    metrics = {}
    for name in stats[0]:
        values = [s[name] for s in stats]
        assert not any(s.value.requires_grad for s in values), name
        if values[0].weight is None:
            metrics[name] = max(float(s.value) for s in values)
        else:
            weight = sum(float(s.weight) for s in values if s.weight is not None)
            metrics[name] = sum(float(s.value) for s in values) / max(weight, 1)
    return metrics
