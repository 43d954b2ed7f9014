"""`Dataset`: the rows of a run on the driver, and the endless, seeded, resumable order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.data.report import Report
from rolegraph.errors import DataError


class Dataset:
    """The rows of a source in tokens: light columns here, the others wherever `rows` has them."""

    def __init__(self, rows: Batch, report: Report, *, shuffle: bool = True) -> None:
        self.rows = rows
        """All rows in the order of the source."""
        self.report = report
        """What became of the rows of the source."""
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, size: int, seed: int, start: int = 0) -> Batches:
        """Endless batches of `size` rows, each epoch in an order of its own; `start` rows are passed over.

        No row is dropped: a batch may end one epoch and begin the next.
        """
        return Batches(self.rows, size, seed, shuffle=self.shuffle, start=start)


class Batches(Iterator[Batch]):
    """The iterator of `Dataset.batches`; `state` says where it is and `restore` goes there.

    >>> rows = Batch.from_columns({"uid": ["a", "b", "c"]})
    >>> drawn = Batches(rows, 2, seed=0, shuffle=False)
    >>> [next(drawn)["uid"].to_pylist() for _ in range(3)]
    [['a', 'b'], ['c', 'a'], ['b', 'c']]
    >>> drawn.state()["epoch"], drawn.state()["position"]
    (2, 0)
    """

    def __init__(self, rows: Batch, size: int, seed: int, *, shuffle: bool = True, start: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a batch of {size} rows")
        if not len(rows):
            raise DataError("no rows to draw batches from")
        self._rows, self._size, self._seed, self._shuffle = rows, size, seed, shuffle
        self._epoch, self._position = divmod(start, len(rows))
        self._order = self._permutation()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        indices: list[np.ndarray[Any, Any]] = []
        missing = self._size
        while missing:
            part = self._order[self._position : self._position + missing]
            indices.append(part)
            missing -= len(part)
            self._position += len(part)
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
        return self._rows.take(np.concatenate(indices))

    def state(self) -> dict[str, int | bool]:
        """Where the next batch begins, as plain values for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "rows": len(self._rows),
            "shuffle": self._shuffle,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the state is of other data, or of another order.
        """
        for key, value in (("rows", len(self._rows)), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state.get(key) != value:
                raise DataError(
                    f"cannot resume the data: {key} was {state.get(key)} in the checkpoint and is {value} now; "
                    "resume with the data, seed and filters of the first run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray[Any, Any]:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))
