"""Asking teachers, whichever a row has and wherever they are: the driver's side of distillation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import SelfTeacherConfig
from rolegraph.algorithms.distillation import TEACHER_KEY as KEY
from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.interfaces import TeacherRole, TrainRole
from rolegraph.losses.advantages import Ints
from rolegraph.turns import Phase

ROWS_A_CALL = 64
"""Rows that a teacher scores in one call: what it returns for them is one object in the store for each of its ranks,
and a reader of a few rows pulls no more than that."""
LARGE = ("teacher_hidden", "teacher_ids", "teacher_logprobs")
"""What a teacher gives that files of samples leave out: K numbers a token, and more."""


@dataclass(frozen=True)
class Ask:
    """What a teacher is asked for each response token; see `TeacherRole.score`."""

    topk: int = 0
    hidden: bool = False
    temperature: float = 1.0


class SelfTeacher:
    """The policy as its own teacher: no role of its own, but weights that the train role keeps."""

    Config: ClassVar[type[SelfTeacherConfig]] = SelfTeacherConfig

    def __init__(self, config: SelfTeacherConfig, train: TrainRole) -> None:
        self.config = config
        self.train = train

    def score(self, batch: Batch, *, topk: int, hidden: bool, temperature: float) -> Awaitable[Batch]:
        """See `TeacherRole.score`."""
        return self.train.teach(batch, weights=self.config.weights, topk=topk, hidden=hidden, temperature=temperature)

    async def follow(self) -> None:
        """Take the weights of now into the average, where one is kept; the first call begins it."""
        if self.config.weights == "average":
            await self.train.average_weights(self.config.decay)


class Teachers:
    """All teachers of a run behind one `score`.

    Args:
        teachers: handles by role name, or the policy as its own teacher.
        temperature: the one at which all are asked, for some know no other; null: that of the `Ask`.
    """

    def __init__(self, teachers: Mapping[str, TeacherRole | SelfTeacher], temperature: float | None = None) -> None:
        self.by_role = dict(teachers)
        self.temperature = temperature

    @property
    def own(self) -> SelfTeacher | None:
        """The policy, where it is the teacher."""
        return next((teacher for teacher in self.by_role.values() if isinstance(teacher, SelfTeacher)), None)

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases in which they work, whatever the names of their roles."""
        needs = {role: ("model",) for role, teacher in self.by_role.items() if not isinstance(teacher, SelfTeacher)}
        beside = Phase({"train": ("model",), **needs})
        return {"teacher": Phase(needs), "teacher_head": beside, "teach": beside}

    def asked(self, topk: int, hidden: bool, temperature: float) -> Ask:
        """What to ask them for in a run at `temperature`: all of them tell logprobs of one temperature."""
        return Ask(topk, hidden, temperature if self.temperature is None else self.temperature)

    @property
    def phase(self) -> str:
        """The phase of a step in which it scores."""
        return "teach" if self.own is not None else "teacher"

    async def score(self, rows: Batch, ask: Ask) -> Batch:
        """The rows with the teacher's columns beside theirs.

        Raises ConfigError for a row whose teacher is no role of this run.
        """
        if not len(rows):
            return rows
        parts = [
            (part, asyncio.ensure_future(self._call(role, rows.take(part), ask)))
            for role, mine in self.assigned(rows).items()
            for part in np.array_split(mine, -(-len(mine) // ROWS_A_CALL))
        ]
        try:
            found = Batch.concat([await call for _, call in parts])
        finally:
            for _, call in parts:
                call.cancel()
        order = np.concatenate([part for part, _ in parts])
        return rows.merge(found if np.array_equal(order, np.arange(len(rows))) else found.take(np.argsort(order)))

    def assigned(self, rows: Batch) -> dict[str, Ints]:
        """The rows of each teacher; see `assigned`."""
        return assigned(rows, list(self.by_role))

    async def _call(self, role: str, rows: Batch, ask: Ask) -> Batch:
        return await self.by_role[role].score(rows, topk=ask.topk, hidden=ask.hidden, temperature=ask.temperature)

    async def taught(self, algorithm: Algorithm, rows: Batch, ask: Ask) -> Batch:
        """`score` in its turn; rows that have a teacher's columns already stay as they are."""
        if "teacher_token_logprobs" in rows or not len(rows):
            return rows
        async with algorithm.turn(self.phase):
            return await self.score(rows, ask)

    async def introduce(self, train: TrainRole, ask: Ask, *, again: bool = False) -> None:
        """Before the first step: what the trainer has to know about the teacher.

        `again`: it goes on from a checkpoint behind that step, which has the average of its weights.
        """
        if self.own is not None and not again:
            await self.own.follow()
        if not ask.hidden:
            return
        if len(self.by_role) > 1:
            raise ConfigError(
                f"{len(self.by_role)} teachers and the whole vocabulary do not go together, for the trainer holds the "
                "head of one: set algorithm.gkd_logits_topk"
            )
        (teacher,) = self.by_role.values()
        if isinstance(teacher, SelfTeacher):
            await train.use_teacher_head(teacher.config.weights)
        else:
            await train.use_teacher_head(*await teacher.head())


def assigned(rows: Batch, names: Sequence[str]) -> dict[str, Ints]:
    """The rows of each of the teachers of these names; raises ConfigError where a row's is none of them."""
    if KEY not in rows:
        if len(names) > 1:
            raise ConfigError(
                f"{len(names)} teachers take part ({', '.join(names)}), and the dataset has no column {KEY} that says "
                "which one a row has: add it (data.columns renames one), or keep one teacher"
            )
        return {names[0]: np.arange(len(rows))}
    wanted = ["teacher" if key in (None, "") else f"teacher_{key}" for key in rows[KEY].to_pylist()]
    if unknown := next((name for name in wanted if name not in names), None):
        raise ConfigError(
            f"row {rows['uid'][wanted.index(unknown)].as_py()} has {KEY}={unknown.removeprefix('teacher_')}, and "
            f"this run has no role {unknown} (its teachers are {', '.join(names)}): add one with "
            f"+teacher@{unknown}=NAME"
        )
    every = np.asarray(wanted)
    return {role: np.flatnonzero(every == role) for role in dict.fromkeys(wanted)}
