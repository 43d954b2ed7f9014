"""Decorated classes for tests, in a module of their own as a user's are."""

from __future__ import annotations

import os
import random
import signal
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.decorators import function, worker


@worker(group=["model1", "model2"])
class MyTrainer:
    """The two-model program: model1 samples, model2 looks at the samples."""

    def __init__(self, args):  # type: ignore[no-untyped-def]
        self.args = args
        self.where = "driver"
        self.data = list(range(args.size))
        self.prepared = [self._prepare_model1(), self._prepare_model2()]
        args.size = 0  # what a construction does to its arguments stays where it is done

    @function(group="model1")
    def _prepare_model1(self):  # type: ignore[no-untyped-def]
        self.where = "model1"
        self.weight = random.Random(self.args.seed).randint(2, 9)

    @function(group="model2")
    def _prepare_model2(self):  # type: ignore[no-untyped-def]
        self.where = "model2"
        self.bias = 0.5

    @function(group="model1", dispatch="slice", collect="flatten")
    def rollout(self, inputs):  # type: ignore[no-untyped-def]
        return [self.weight * value for value in inputs]

    @function(group="model2")
    def forward_model2(self, inputs):  # type: ignore[no-untyped-def]
        return sum(inputs) + self.bias

    @function(group="model1", execute="first")
    def update(self, by: int) -> int:
        self.weight += by
        return self.weight

    @function(group="model1")
    def step(self, by: int) -> int:
        self.weight += by
        return self._double(self.weight)

    def _double(self, value: int) -> int:
        return 2 * value

    @function(group="model1")
    def what_is_here(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "where": self.where,
            "size": len(self.data),
            "has_bias": hasattr(self, "bias"),
            "told": os.environ.get("TOLD"),
        }

    @function(group="model1")
    def ask_model2(self) -> Any:
        return self.forward_model2([1])

    @function(group="model2", dispatch="slice", collect="flatten")
    def fail_on(self, values: list[int], bad: int) -> list[int]:
        if bad in values:
            raise ValueError(f"{bad} cannot be had")
        return values

    @function(group="model2")
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train(self):  # type: ignore[no-untyped-def]
        """The driver's loop."""
        losses = []
        for _ in range(3):
            samples = self.rollout(self.data)
            losses.append((samples, self.forward_model2(samples)[0]))
            self.step(1)
        return losses


def interleaved(n: int, i: int, data: list[int]) -> list[int]:
    """Every n-th item."""
    return data[i::n]


def pair(n: int, i: int, data: dict[str, list[int]], *, scale: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of actor i."""
    return ({key: values[i::n] for key, values in data.items()},), {"scale": scale + i}


def merged(results: Sequence[list[int]]) -> list[int]:
    """All items in order."""
    return sorted(item for result in results for item in result)


@worker(group="calc")
class Calculator:
    """One class, one group; every kind of argument and of collected result."""

    def __init__(self, base: int = 0, *, names: tuple[str, ...] = ()) -> None:
        self.base = base
        self.names = names

    @function("calc", dispatch=interleaved, collect=merged)
    def squares(self, data: list[int]) -> list[int]:
        return [self.base + item**2 for item in data]

    @function("calc", dispatch=pair)
    def scaled(self, data: dict[str, list[int]], *, scale: int) -> dict[str, int]:
        return {key: scale * sum(values) for key, values in data.items()}

    @function("calc", dispatch="slice", collect="flatten")
    def weighted(self, items: list[int], weights: np.ndarray, pair: tuple[int, int]) -> list[float]:  # type: ignore[type-arg]
        return [float(item * weights.sum() + pair[0]) for item in items]

    @function("calc", dispatch="slice", collect="flatten")
    def tokens(self, batch: Batch) -> Batch:
        return batch.with_columns({"ids": [[n, n + self.base] for n in batch.numpy("n").tolist()]})

    @function("calc", dispatch="slice", collect="flatten")
    def halves(self, items: list[int]) -> tuple[list[float], list[str]]:
        return [item / 2 for item in items], [str(item) for item in items]

    @function("calc")
    def about(self) -> tuple[int, tuple[str, ...]]:
        return self.base, self.names


@worker(group="calc")
class Louder(Calculator):
    """Overrides a function by a plain method, and calls the base's."""

    def __init__(self, base: int) -> None:
        super().__init__(base)
        self.extra = 1000

    def squares(self, data):  # type: ignore[no-untyped-def, override]
        return [value + self.extra for value in Calculator.squares(self, data)]


class NotDecorated(Calculator):
    pass


@worker(group="broken")
class Broken:
    def __init__(self) -> None:
        self._load()

    @function("broken")
    def _load(self) -> None:
        raise OSError("no such weights")


def arguments(size: int = 7) -> Namespace:
    """What MyTrainer is constructed with."""
    return Namespace(seed=3, size=size)
