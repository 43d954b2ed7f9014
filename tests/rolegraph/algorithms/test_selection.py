"""Which candidates of a row are kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.algorithms.selection import Candidate, Rules, data_part, normalised, select

SCORES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
ROLES = ("orm", "orm_judge", "prm")


def of(rewards: Sequence[float | None], role: str = "orm") -> list[Candidate]:
    """A candidate for each score, numbered from 0."""
    return [Candidate(repeat, {role: reward}) for repeat, reward in enumerate(rewards)]


def test_scores_are_placed_between_the_lowest_and_the_highest_of_the_row() -> None:
    assert normalised([1.0, 3.0, 2.0]).tolist() == [0.0, 1.0, 0.5]
    assert normalised([-4.0, -2.0]).tolist() == [0.0, 1.0]


def test_equal_scores_say_nothing() -> None:
    assert normalised([7.0, 7.0]).tolist() == [0.0, 0.0]
    assert normalised([0.0]).tolist() == [0.0]
    assert normalised([]).tolist() == []


def test_a_null_score_is_no_score_and_moves_no_other() -> None:
    found = normalised([1.0, None, 3.0])
    assert found[[0, 2]].tolist() == [0.0, 1.0]
    assert np.isnan(found[1])
    assert np.isnan(normalised([None, None])).all()


@given(st.lists(SCORES, max_size=8))
def test_normalised_scores_keep_their_order_and_stay_in_bounds(scores: list[float | None]) -> None:
    found = normalised(scores)
    told = sorted((score, place) for score, place in zip(scores, found, strict=True) if score is not None)
    assert all(0 <= place <= 1 for _, place in told)
    for (a, x), (b, y) in itertools.pairwise(told):
        assert x <= y, (a, b)
    if told and told[0][0] < told[-1][0]:
        assert (told[0][1], told[-1][1]) == (0.0, 1.0)


def test_an_outcome_passes_above_0_only() -> None:
    found = select(of([1.0, 0.0, -1.0, None, 0.5]), Rules(weights={"orm": 1.0}))
    assert found.kept == (0, 4)
    assert found.failed == {1: "orm: not above 0", 2: "orm: not above 0", 3: "orm: no score"}
    assert found.passed == 2


def test_every_outcome_role_has_its_say_whatever_its_weight() -> None:
    both = [Candidate(0, {"orm": 1.0, "orm_judge": 0.0}), Candidate(1, {"orm": 1.0, "orm_judge": 5.0})]
    assert select(both, Rules(weights={"orm": 1.0, "orm_judge": 0.0})).kept == (1,)


def test_a_process_score_passes_above_the_threshold_only() -> None:
    rules = Rules(weights={"prm": 1.0}, prm_threshold=0.5)
    found = select(of([0.5, 0.6, None], "prm"), rules)
    assert found.kept == (1,)
    assert found.failed == {0: "prm: not above 0.5", 2: "prm: no score"}


def test_without_a_threshold_a_process_score_ranks_and_fails_nobody() -> None:
    found = select(of([0.1, None, 0.9], "prm"), Rules(weights={"prm": 1.0}))
    assert found.kept == (2, 0, 1), "what has no score comes last"
    assert found.totals == {0: 0.0, 1: None, 2: 1.0}


def test_without_scores_every_response_is_kept() -> None:
    candidates = [Candidate(1, {}), Candidate(0, {}), Candidate(2, {}, answered=False)]
    assert select(candidates, Rules()).kept == (0, 1)


def test_the_best_are_kept_and_ties_go_to_the_lower_repeat() -> None:
    rules = Rules(weights={"orm": 1.0}, n_best_to_keep=2)
    assert select(of([1.0, 3.0, 3.0, 2.0]), rules).kept == (1, 2)
    assert select(of([1.0, 1.0, 1.0]), rules).kept == (0, 1)


def test_weights_decide_among_roles() -> None:
    candidates = [Candidate(0, {"orm": 2.0, "prm": 0.1}), Candidate(1, {"orm": 1.0, "prm": 0.9})]
    assert select(candidates, Rules(weights={"orm": 1.0, "prm": 0.5}, n_best_to_keep=1)).kept == (0,)
    assert select(candidates, Rules(weights={"orm": 1.0, "prm": 2.0}, n_best_to_keep=1)).kept == (1,)
    assert select(candidates, Rules(weights={"orm": 1.0, "prm": -2.0}, n_best_to_keep=1)).kept == (0,)


def test_a_score_of_no_weight_that_is_null_leaves_the_total_alone() -> None:
    candidates = [Candidate(0, {"orm": 1.0, "prm": None}), Candidate(1, {"orm": 2.0, "prm": 0.5})]
    assert select(candidates, Rules(weights={"orm": 1.0, "prm": 0.0})).totals == {0: 0.0, 1: 1.0}
    assert select(candidates, Rules(weights={"orm": 1.0, "prm": 1.0})).totals == {0: None, 1: 1.0}


@pytest.mark.parametrize(
    ("share", "solved", "of_all", "is_dropped"),
    [
        (0.5, 2, 4, True),
        (0.5, 1, 4, False),
        (0.7, 7, 10, True),
        (0.7, 6, 10, False),
        (1.0, 3, 3, True),
        (0.01, 0, 3, False),
    ],
)
def test_a_row_that_is_mostly_solved_is_too_easy(share: float, solved: int, of_all: int, is_dropped: bool) -> None:
    rules = Rules(weights={"orm": 1.0}, easy_query_threshold=share)
    found = select(of([1.0] * solved + [0.0] * (of_all - solved)), rules)
    assert (found.dropped == "too easy") == is_dropped
    assert bool(found.kept) == (not is_dropped and solved > 0)


def test_candidates_without_a_score_count_in_the_share() -> None:
    rules = Rules(weights={"orm": 1.0}, easy_query_threshold=0.6)
    assert select(of([1.0, None]), rules).dropped is None


def test_why_a_row_is_dropped() -> None:
    rules = Rules(weights={"orm": 1.0})
    assert select(of([0.0, None]), rules).dropped == "no candidate passed"
    assert select([Candidate(0, {"orm": None}, answered=False)], rules).dropped == "no response"
    assert select([], rules).dropped == "no response"


PAIRS = Rules(weights={"orm": 1.0}, output="pairs")


def test_a_pair_is_the_best_that_passed_against_the_worst_that_did_not() -> None:
    found = select(of([0.0, 2.0, -3.0, 1.0, -3.0]), PAIRS)
    assert (found.kept, found.rejected) == ((1,), 2)


def test_what_could_not_be_told_is_nobodys_bad_example() -> None:
    found = select(of([1.0, None, -1.0]), PAIRS)
    assert found.rejected == 2
    assert select(of([1.0, None]), PAIRS).dropped == "no failed candidate has a score: no pair"
    unanswered = [Candidate(0, {"orm": 1.0}), Candidate(1, {"orm": None}, answered=False)]
    assert select(unanswered, PAIRS).rejected is None


def test_rows_without_two_sides_give_no_pair() -> None:
    assert select(of([1.0, 2.0]), PAIRS).dropped == "every candidate passed: no pair"
    assert select(of([0.0, -2.0]), PAIRS).dropped == "no candidate passed"
    assert select(of([0.0, -2.0]), PAIRS).kept == ()


def test_a_repeat_comes_once() -> None:
    with pytest.raises(ValueError, match="the same repeat"):
        select([Candidate(0, {}), Candidate(0, {})], Rules())


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        repeat=st.integers(0, 50),
        scores=st.fixed_dictionaries({role: st.none() | st.floats(-2, 2) for role in ROLES}),
        answered=st.booleans(),
    ),
    max_size=7,
    unique_by=lambda candidate: candidate.repeat,
)
RULES = st.builds(
    Rules,
    weights=st.fixed_dictionaries({role: st.floats(-2, 2) for role in ROLES}),
    prm_threshold=st.none() | st.floats(-2, 2),
    easy_query_threshold=st.none() | st.floats(0.1, 1),
    n_best_to_keep=st.none() | st.integers(1, 5),
    output=st.sampled_from(["kept", "pairs"]),
)


@given(CANDIDATES, RULES, st.randoms())
def test_the_order_in_which_candidates_come_changes_nothing(candidates: list[Candidate], rules: Rules, draw) -> None:
    shuffled = list(candidates)
    draw.shuffle(shuffled)
    assert select(shuffled, rules) == select(candidates, rules)


@given(CANDIDATES, RULES)
def test_what_holds_of_every_selection(candidates: list[Candidate], rules: Rules) -> None:
    found = select(candidates, rules)
    repeats = {candidate.repeat for candidate in candidates}
    assert set(found.kept) <= repeats - set(found.failed)
    assert found.passed + len(found.failed) == len(candidates)
    assert bool(found.kept) == (found.dropped is None)
    assert set(found.totals) == repeats
    if rules.output == "pairs":
        assert (found.rejected is not None) == bool(found.kept)
        assert found.rejected is None or found.rejected in found.failed
    elif found.kept:
        assert len(found.kept) == min(found.passed, rules.n_best_to_keep or found.passed)


@given(st.integers(0, 200), st.integers(1, 30))
def test_parts_of_the_data_are_contiguous_balanced_and_whole(rows: int, parts: int) -> None:
    found = [data_part(rows, (index, parts)) for index in range(parts)]
    assert [row for part in found for row in part] == list(range(rows))
    sizes = {len(part) for part in found}
    assert max(sizes) - min(sizes) <= 1
