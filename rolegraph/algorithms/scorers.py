"""Asking reward roles, however many and wherever they are, and adding up what they say: the driver's side of scoring.

A role's *score* of a row is one number: `reward` of an outcome role, `prm_score` of a process role. All of them are
columns `scores/ROLE`, and their sum, weighted by the config, is the column `reward`; it is null where a score that
counts is, for the sum of the others would be compared with sums of more.

The parts of `orm` keep their names (`rewards/NAME`); those of a further outcome role have the role's name in front
(`rewards/orm_judge/NAME`, `reward_faults/orm_judge/NAME`, `reward_reasons/orm_judge`), so that two roles with a reward
of one name never collide. `reward_faults` counts those of all outcome roles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.interfaces import ORMRole, PRMRole, StepReduce
from rolegraph.losses.advantages import Floats
from rolegraph.role import family
from rolegraph.turns import Phase, scoring

TOTAL = "reward"
FAULTS = "reward_faults"


class TakesTurns(Protocol):
    """An algorithm, or whoever else computes on devices that roles share."""

    def turn(self, name: str) -> AbstractAsyncContextManager[None]:
        """A phase by its name; see `Algorithm.turn`."""
        ...


class Scorers:
    """All prm and orm roles of a run behind one `score`.

    Args:
        roles: handles by role name.
        weights: of each role's score in the sum; 1 for those that are not named.
        reduce: how the scores of a response's steps become the score of a prm.
        left_out: roles whose score takes no part in the sum (a prm that rewards the steps themselves).
    """

    def __init__(
        self,
        roles: Mapping[str, PRMRole | ORMRole],
        *,
        weights: Mapping[str, float] = MappingProxyType({}),
        reduce: StepReduce = "min",
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.by_role = dict(roles)
        self.weights = {role: weights.get(role, 1.0) for role in roles if role not in left_out}
        """Of the roles that take part in the sum."""
        self.reduce = reduce

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.by_role)

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases in which they work."""
        return {name: phase for role in self.by_role for name, phase in scoring(role).items()}

    async def score(self, algorithm: TakesTurns, rows: Batch, *, in_turn: bool = False) -> Batch:
        """The rows with every role's columns beside theirs, `scores/ROLE`, and their weighted sum `reward`.

        Each role has a turn of its own: those whose devices differ work side by side, those that share one in turn
        (with `in_turn` all of them). The sum is null where a score that counts is.
        """
        if in_turn:
            return self.together(rows, {role: await self._ask(algorithm, role, rows) for role in self.by_role})
        calls = [asyncio.ensure_future(self._ask(algorithm, role, rows)) for role in self.by_role]
        try:
            found = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            # Each gives its turn back before anybody goes on.
            await asyncio.gather(*calls, return_exceptions=True)
        return self.together(rows, dict(zip(self.by_role, found, strict=True)))

    async def _ask(self, algorithm: TakesTurns, role: str, rows: Batch) -> Batch:
        (phase,) = scoring(role)
        async with algorithm.turn(phase):
            if family(role) == "prm":
                return await cast(PRMRole, self.by_role[role]).score(rows, reduce=self.reduce)
            return await cast(ORMRole, self.by_role[role]).score(rows)

    def together(self, rows: Batch, found: Mapping[str, Batch]) -> Batch:
        """One batch of what each role gave for the same rows; see `score`."""
        # The first batch stands for the rows: what it holds of them is not held twice.
        merged: Batch | None = None
        scores: dict[str, Floats] = {}
        faults = [batch.numpy(FAULTS) for batch in found.values() if FAULTS in batch]
        for role, batch in found.items():
            scores[role] = batch.numpy("prm_score" if family(role) == "prm" else TOTAL)
            own = batch.drop((TOTAL, FAULTS)).rename(_new_names(role, batch, rows))
            merged = own if merged is None else merged.merge(own.drop(merged.column_names))
        columns: dict[str, Any] = {f"scores/{role}": _nullable(values) for role, values in scores.items()}
        if faults:
            columns[FAULTS] = np.sum(faults, axis=0).astype(np.int32)
        columns[TOTAL] = _nullable(self.total(scores, len(rows)))
        return (rows if merged is None else merged).with_columns(columns)

    def total(self, scores: Mapping[str, Floats], rows: int) -> Floats:
        """[rows] the weighted sum of the roles' scores; NaN where one of a weight other than 0 is none.

        Zeros where no role takes part in the sum.
        """
        total = np.zeros(rows)
        for role, weight in self.weights.items():
            if weight:
                total = total + weight * np.where(np.isfinite(scores[role]), scores[role], np.nan)
        return total


def _new_names(role: str, batch: Batch, rows: Batch) -> dict[str, str]:
    """What the columns of a further outcome role are called, where its own names are not enough."""
    if role in ("orm", "prm"):
        return {}
    names = {"reward_reasons": f"reward_reasons/{role}"} if "reward_reasons" in batch else {}
    for kind in ("rewards/", "reward_faults/"):
        own = [name for name in batch.column_names if name.startswith(kind) and name not in rows]
        names |= {name: f"{kind}{role}/{name.removeprefix(kind)}" for name in own}
    return names


def _nullable(values: Floats) -> pa.Array:
    return pa.array(np.where(np.isfinite(values), values, np.nan), pa.float64(), from_pandas=True)
