"""Which candidates are drawn, and what they look like."""

from __future__ import annotations

import pytest

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, TurnError
from rolegraph.interfaces import SamplingParams
from roles.rollout.drawing import sample_seed
from roles.sampler.candidates import Candidates, refuse_level_2


def rows(**columns: list[object]) -> Batch:
    return Batch.from_columns({"uid": ["a", "b", "c"], "prompt_ids": [[1], [2, 3], [4]], **columns})


def test_n_a_row_or_those_that_the_row_names() -> None:
    every = Candidates.of(rows(), SamplingParams(n=2))
    assert (every.source, every.repeats) == ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    missing = Candidates.of(rows(repeats=[[3, 1], [], [0]], answer=[5, 6, 7]), SamplingParams(n=2))
    assert (missing.source, missing.repeats) == ([0, 0, 2], [3, 1, 0])
    assert list(missing.by_row()) == [(0, [0, 1]), (2, [2])]
    assert missing.rows.column_names == ["uid", "prompt_ids", "answer"]
    assert missing.rows["answer"].to_pylist() == [5, 5, 7]
    assert len(Candidates.of(rows().slice(0, 0), SamplingParams())) == 0


def test_a_seed_is_the_candidates_own_whenever_it_is_drawn() -> None:
    first = Candidates.of(rows(), SamplingParams(n=4, seed=9, step=3))
    later = Candidates.of(rows(repeats=[[2], [], []]).slice(0, 1), SamplingParams(n=4, seed=9, step=8))
    assert later.seeds == [first.seeds[2]] == [sample_seed(9, "a", 0, 2)]
    assert len(set(first.seeds)) == 12
    assert Candidates.of(rows(), SamplingParams(n=1)).seeds == [None] * 3


@pytest.mark.parametrize("repeats", [[[0, 0], [], []], [[-1], [], []]])
def test_repeats_that_are_none(repeats: list[list[int]]) -> None:
    with pytest.raises(BatchError, match=r"row a: repeats=.* different numbers from 0"):
        Candidates.of(rows(repeats=repeats), SamplingParams())
    with pytest.raises(BatchError, match="at least one candidate"):
        Candidates.of(rows(), SamplingParams(n=0))


def test_a_candidate_with_a_fault_is_a_row_without_text() -> None:
    wanted = Candidates.of(rows().slice(0, 2), SamplingParams(n=1, step=4))
    drawn = wanted.with_tokens(
        [([7, 8], [-1.0, -2.0], "stop"), ([], [], "error")],
        [None, "no room"],
        lambda ids: ["".join(map(str, row)) for row in ids],
    )
    drawn.check_alignment()
    assert drawn["response_text"].to_pylist() == ["78", None]
    assert drawn["finish_reason"].to_pylist() == ["stop", "error"]
    assert drawn["sample_fault"].to_pylist() == [None, "no room"]
    assert drawn["step"].to_pylist() == [4, 4]
    assert drawn["prompt_length"].to_pylist() == [1, 2]
    assert drawn["response_length"].to_pylist() == [2, 0]
    assert drawn["length"].to_pylist() == [3, 2]


def test_weights_that_nobody_brings_back_are_not_dropped() -> None:
    refuse_level_2("sampler", 1)
    with pytest.raises(TurnError, match=r"sampler\.sleep\(level=2\).*placement\.sleep_level=1"):
        refuse_level_2("sampler", 2)
