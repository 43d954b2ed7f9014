"""The Megatron teacher agrees with the transformers one on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.columns import from_fixed_size_rows
from rolegraph.errors import ConfigError
from rolegraph.role import RoleContext
from roles.teacher.config import HuggingFaceTeacherConfig, MegatronTeacherConfig
from roles.teacher.huggingface import HuggingFaceTeacher
from tests.models import make_checkpoint
from tests.roles.train.megatron_workers import free_port, grouped, make_batch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("teacher") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def other(folder: str) -> HuggingFaceTeacher:
    role = HuggingFaceTeacher(HuggingFaceTeacherConfig(model=folder), RoleContext(role="teacher", threads=1))
    role.setup()
    return role


@pytest.fixture(scope="module")
def teacher(folder: str) -> Iterator[Any]:
    from roles.teacher.megatron import MegatronTeacher

    context = RoleContext(role="teacher", threads=1, master_port=free_port())
    role = MegatronTeacher(MegatronTeacherConfig(model=folder, micro_batch_size=3), context)
    role.setup()
    yield role
    role.teardown()


def with_teacher_prompts(batch: Batch) -> Batch:
    own = [[9, 8, 7, 6, 5, 4, 3, 2, 1][: n % 9 + 1] if n % 2 else None for n in range(len(batch))]
    return batch.with_columns({"teacher_prompt_ids": own})


@pytest.mark.parametrize("rows", [make_batch(7, 0), grouped(make_batch(8, 1)), with_teacher_prompts(make_batch(6, 2))])
def test_both_tell_the_same(rows: Batch, teacher: Any, other: HuggingFaceTeacher) -> None:
    ask: dict[str, Any] = {"topk": 6, "hidden": True, "temperature": 0.7}
    ours, theirs = teacher.score(rows, **ask), other.score(rows, **ask)
    assert ours.column_names == theirs.column_names
    for name in ours.column_names:
        one, two = ours.ragged(name), theirs.ragged(name)
        assert np.array_equal(one.offsets, two.offsets)
        assert one.values.dtype == two.values.dtype
        if name == "teacher_ids":
            assert (one.values == two.values).mean() > 0.99, "ties may fall either way"
        else:
            np.testing.assert_allclose(one.values, two.values, atol=1e-4, rtol=0)


def test_both_give_the_same_head(teacher: Any, other: HuggingFaceTeacher) -> None:
    (ours, info), (theirs, their_info) = teacher.head(), other.head()
    assert info == their_info
    assert np.array_equal(from_fixed_size_rows(ours["weight"]), from_fixed_size_rows(theirs["weight"]))


def test_messages_name_the_teachers_own_keys(folder: str) -> None:
    from roles.teacher.megatron import MegatronTeacher

    config = MegatronTeacherConfig(model=folder, sequence_parallel=True, megatron={"bf16": True})
    with pytest.raises(ConfigError) as caught:
        MegatronTeacher(config, RoleContext(role="teacher", threads=1)).setup()
    assert "teacher.sequence_parallel=true needs teacher.tensor_model_parallel_size above 1" in str(caught.value)
    assert "teacher.megatron.bf16 is set by rolegraph; use teacher.dtype" in str(caught.value)
