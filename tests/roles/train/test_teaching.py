"""What is checked of rows before a teacher reads them, and what the student keeps of a teacher's head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.columns import fixed_size_rows
from rolegraph.errors import AlignmentError, RoleGraphError
from rolegraph.interfaces import HeadInfo
from roles.train.teaching import as_numpy, seen_by_teacher, teacher_head, teacher_states

ROWS = {"uid": ["a", "b", "c"], "prompt_ids": [[1, 2], [3], [4, 5]], "response_ids": [[6], [], [7, 8]]}


def test_a_row_is_read_with_the_teachers_prompt_where_it_has_one() -> None:
    batch = Batch.from_columns({**ROWS, "teacher_prompt_ids": [None, [9, 9, 9], None], "length": [3, 1, 4]})
    rows = seen_by_teacher(batch, 10)
    assert rows["prompt_ids"].to_pylist() == [[1, 2], [9, 9, 9], [4, 5]]
    assert rows["response_ids"].to_pylist() == ROWS["response_ids"]


@pytest.mark.parametrize(
    ("vocab_size", "teacher_prompt", "message"),
    [
        (8, None, "row c: token 8 in response_ids is beyond the teacher's vocabulary of 8"),
        (7, None, "row c: token 7 in response_ids is beyond the teacher's vocabulary of 7"),
        (5, None, "row c: token 5 in prompt_ids is beyond"),
        (9, [[1], [2, 30, 2], None], "row b: token 30 in prompt_ids is beyond the teacher's vocabulary of 9"),
    ],
)
def test_a_token_that_the_teacher_does_not_have_is_named(
    vocab_size: int, teacher_prompt: list[list[int] | None] | None, message: str
) -> None:
    batch = Batch.from_columns({**ROWS, **({"teacher_prompt_ids": teacher_prompt} if teacher_prompt else {})})
    with pytest.raises(RoleGraphError) as caught:
        seen_by_teacher(batch, vocab_size)
    assert message in str(caught.value)
    assert len(seen_by_teacher(batch, 31)) == 3


@pytest.mark.parametrize("first", [0, 4, 8])
def test_a_rank_whose_tokens_lie_partly_or_wholly_beyond_the_teachers_keeps_what_there_is(first: int) -> None:
    """Ranks of four rows each; the teacher has six tokens."""
    weight = torch.arange(24.0).reshape(6, 4).bfloat16()
    head = Batch.from_columns({"weight": fixed_size_rows(as_numpy(weight)), "bias": np.arange(6.0, dtype=np.float32)})
    kept = teacher_head(head.slice(first, first + 4), HeadInfo(6, 4, "bfloat16"), first, torch.device("cpu"))
    assert torch.equal(kept.head.weight, weight[first : first + 4])
    assert kept.head.bias is not None
    assert kept.head.bias.tolist() == list(range(first, min(first + 4, 6)))
    assert (kept.head.first, kept.head.columns) == (first, len(weight[first : first + 4]))


def test_states_are_one_a_response_token() -> None:
    states = torch.randn(3, 4).bfloat16()
    columns = {**ROWS, "teacher_hidden": [as_numpy(states[:1]), as_numpy(states[:0]), as_numpy(states[1:])]}
    found = teacher_states(Batch.from_columns(columns), HeadInfo(9, 4, "bfloat16"))
    assert torch.equal(found, states)
    short = {**columns, "teacher_hidden": [as_numpy(states[:1]), as_numpy(states[:0]), as_numpy(states[2:])]}
    with pytest.raises(AlignmentError, match="row c: the teacher gave 1 hidden states for 2 response tokens"):
        teacher_states(Batch.from_columns(short), HeadInfo(9, 4, "bfloat16"))
