"""A teacher with the student's weights has nothing to teach, whoever it is, whatever it tells, and however rows lie.

That it is seen to have nothing is no accident of a loss that is always small: a token further on, it is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.columns import Ragged
from rolegraph.errors import AlignmentError
from rolegraph.interfaces import LossSpec
from rolegraph.role import RoleContext
from roles.teacher.config import HuggingFaceTeacherConfig
from roles.teacher.huggingface import HuggingFaceTeacher
from tests.models import VOCAB
from tests.roles.train.megatron_workers import grouped, make_batch

pytestmark = pytest.mark.engine

ZERO, LARGE = 2e-6, 1e-3
"""Nats a token."""
TEACHERS = ("huggingface", "current", "initial", "average")
COUNTS = (2, 8, VOCAB)


@pytest.fixture(scope="module")
def huggingface(folder: Path) -> HuggingFaceTeacher:
    """The student's checkpoint in transformers, rows padded on the right."""
    config = HuggingFaceTeacherConfig(model=str(folder / "qwen3"), max_tokens_per_micro_batch=60)
    role = HuggingFaceTeacher(config, RoleContext(role="teacher", threads=1))
    role.setup()
    return role


@pytest.fixture(params=[True, False], ids=["packed", "padded"])
def student(request: pytest.FixtureRequest, start: Callable[..., Any]) -> Any:
    """A trainer with all sets of weights that may teach, none of which has moved."""
    role = start(padding_free=request.param, max_tokens_per_micro_batch=60)
    role.save_reference()
    role.average_weights(0.9)
    return role


def scores(teacher: str, student: Any, huggingface: HuggingFaceTeacher, rows: Batch, **ask: Any) -> Batch:
    if teacher == "huggingface":
        return huggingface.score(rows, **ask)
    found: Batch = student.teach(rows, weights=teacher, **ask)
    return found


def use_head(teacher: str, student: Any, huggingface: HuggingFaceTeacher) -> None:
    student.use_teacher_head(*(huggingface.head() if teacher == "huggingface" else (teacher,)))


def losses() -> Iterator[tuple[int, LossSpec]]:
    """What is asked for (the top K, 0: hidden states), and a loss on it."""
    target = "rolegraph.losses.distill.DistillLoss"
    for beta in (0.0, 0.5, 1.0):
        yield 0, LossSpec(target, {"beta": beta})
        for count in COUNTS:
            for mode in ("renormalize", "tail"):
                yield count, LossSpec(target, {"beta": beta, "topk_mode": mode})


def divergences(student: Any, rows: Batch, told: dict[int, Batch], temperature: float) -> dict[str, float]:
    """Of each loss, by what it is called in a message; the weights stay."""
    return {
        f"K={count} {loss.kwargs}": student.step(
            rows.merge(told[count]), loss=loss, temperature=temperature, lr=0.0
        )["divergence"]
        for count, loss in losses()
    }  # fmt: skip


def shifted(told: Batch) -> Batch:
    """What a teacher says, told of the next token of the row (of the first one at its end)."""
    moved = {}
    for name in told.column_names:
        column = told.ragged(name)
        parts = [np.roll(part, -1, axis=0) for part in np.split(column.values, column.offsets[1:-1])]
        moved[name] = Ragged(np.concatenate(parts), column.offsets)
    return Batch.from_columns(moved)


def prompt_pairs(rows: Batch) -> tuple[Batch, Batch]:
    """The same responses as two see them: a teacher that brings prompts of its own, and a student that has read them.

    They are shorter than the student's, longer, or, where there is none, the same.
    """
    prompts = rows.lists("prompt_ids")
    own = [None if n % 3 == 0 else [*range(1, 2 + 7 * (n % 2))] for n in range(len(prompts))]
    seen = [theirs or list(prompt) for theirs, prompt in zip(own, prompts, strict=True)]
    return rows.with_columns({"teacher_prompt_ids": own}), rows.with_columns({"prompt_ids": seen})


@pytest.mark.parametrize("teacher", TEACHERS)
def test_it_teaches_nothing(teacher: str, student: Any, huggingface: HuggingFaceTeacher) -> None:
    use_head(teacher, student, huggingface)
    plain = grouped(make_batch(7, 3))
    as_told, as_seen = prompt_pairs(plain)
    for told_of, trained_on, temperature in ((plain, plain, 0.7), (as_told, as_seen, 1.0)):
        told = {
            count: scores(
                teacher, student, huggingface, told_of, topk=count, hidden=count == 0, temperature=temperature
            )
            for count in (0, *COUNTS)
        }
        for case, value in divergences(student, trained_on, told, temperature).items():
            assert abs(value) < ZERO, case
    # The last pair again, seen by a student that has its own prompts, and told a token late.
    for case, value in divergences(student, as_told, told, 1.0).items():
        assert value > LARGE, case
    late = {count: shifted(columns) for count, columns in told.items()}
    for case, value in divergences(student, trained_on, late, 1.0).items():
        assert value > LARGE, case


@pytest.mark.parametrize("name", ["teacher_hidden", "teacher_ids", "teacher_logprobs"])
def test_a_reply_one_token_short_is_told(name: str, student: Any, huggingface: HuggingFaceTeacher) -> None:
    rows = make_batch(5, 3)
    use_head("huggingface", student, huggingface)
    count = 0 if name == "teacher_hidden" else 4
    told = huggingface.score(rows, topk=count, hidden=count == 0)
    column = told.ragged(name)
    row = 3
    assert column.lengths[row] > 1
    offsets = column.offsets.copy()
    offsets[row + 1 :] -= 1
    short = Ragged(np.delete(column.values, column.offsets[row + 1] - 1, axis=0), offsets)
    loss = LossSpec("rolegraph.losses.distill.DistillLoss", {"topk_mode": "tail" if count else None})
    with pytest.raises(AlignmentError, match=f"row {row}: .*{column.lengths[row] - 1}.* {column.lengths[row]} "):
        student.step(rows.merge(told).with_columns({name: short}), loss=loss)
