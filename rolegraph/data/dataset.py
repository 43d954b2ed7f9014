"""`Dataset`: the rows of a run on the driver, and the endless, seeded, resumable order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.data.report import Report
from rolegraph.errors import DataError

Order = np.ndarray[tuple[int], np.dtype[np.int64]]


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

        No row is dropped: a batch may end one epoch and begin the next. No batch has a row twice: rows that a batch has
        from the end of an epoch come later in the next one.

        Raises:
            DataError: there are fewer rows than a batch has.
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
        if len(rows) < size:
            raise DataError(
                f"a batch takes {size} rows, and the dataset has {len(rows)}, so that some would be in it twice: lower "
                "algorithm.global_batch_size (or raise algorithm.num_generations), or give more rows (data.size for "
                "a generated task)"
            )
        self._rows, self._size, self._seed, self._shuffle = rows, size, seed, shuffle
        self._epoch, self._position = divmod(start, len(rows))
        self._order = self._order_of(self._epoch, size, start % size)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        part = self._order[self._position : self._position + self._size]
        self._position += len(part)
        if self._position < len(self._rows):
            return self._rows.take(part)
        missing = self._size - len(part)
        self._epoch, self._position = self._epoch + 1, missing
        # A batch that ends with the epoch has nothing to do with the next one.
        self._order = _after(part if missing else part[:0], self._permutation(self._epoch), self._size)
        return self._rows.take(np.concatenate([part, self._order[:missing]]))

    def state(self) -> dict[str, int | bool]:
        """Where the next batch begins, as plain values for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "size": self._size,
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
        # The order of this epoch is that of the batches it was begun with; theirs may have had another size.
        size = int(state["size"])
        self._order = self._order_of(self._epoch, size, (self._epoch * len(self._rows) + self._position) % size)

    def _order_of(self, epoch: int, size: int, phase: int) -> Order:
        """[rows] the order of an epoch when batches of `size` begin at the rows `phase`, `phase + size`, ..."""
        count = len(self._rows)
        # Only the first `size` rows of an epoch are moved, so its end is known without the epochs before it where that
        # lies behind them.
        first = max(epoch - 1, 0) if count >= 2 * size else 0
        order = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            begun = (later * count - phase) % size
            order = _after(order[count - begun :], self._permutation(later), size)
        return order

    def _permutation(self, epoch: int) -> Order:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))


def _after(begun: Order, order: Order, size: int) -> Order:
    """`order` with the rows that the batch `begun` has already right behind that batch, else as it was.

    >>> _after(np.array([2, 0]), np.array([0, 1, 2, 3, 4]), 3).tolist()
    [1, 0, 2, 3, 4]
    """
    if not len(begun):
        return order
    new = ~np.isin(order, begun)
    stop = int(np.flatnonzero(new)[size - len(begun) - 1]) + 1
    head, fresh = order[:stop], new[:stop]
    return np.concatenate([head[fresh], head[~fresh], order[stop:]])
