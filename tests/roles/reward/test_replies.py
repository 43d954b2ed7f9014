"""What a judge says becomes a number, or a reason; never a number that it did not mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.reward.replies import Bounds, UnreadableError, read_score, read_steps

UNIT = Bounds(0.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1.0),
        ("It adds up.\n**Score:** 0.25", 0.25),
        ("Score: 0\nNo, wait.\nScore: 1.0", 1.0),
        ("score = .5", 0.5),
        ("The score is 0.75.", 0.75),
        ('Here: {"score": 0.5, "why": "a {brace"}', 0.5),
        ('{"why": "Score: 0", "score": 1}', 1.0),
        ("0.5\n", 0.5),
        ("<think>Score: 0</think>Score: 1", 1.0),
        ('\\boxed{1} {"score": 0}', 0.0),
    ],
)
def test_a_score(reply: str, score: float) -> None:
    assert read_score(reply, UNIT) == score


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "no score in ''"),
        ("It is right.", "no score in 'It is right.'"),
        ("<think>Score: 1", "no score in '<think>Score: 1'"),
        ("Score: 7", "7 is not between 0 and 1 in 'Score: 7'"),
        ("Score: -1", "-1 is not between"),
        ("Score: 7/10", "no score in"),
        ("Score: 1/10", "no score in"),
        ("Score: 80%", "no score in"),
        ("Score: 1st", "no score in"),
        ('{"score": true}', "no score in"),
        ('{"score": NaN}', "nan is not between"),
        ('{"score": 1e999}', "inf is not between"),
        ("3", "3 is not between"),
        ("x" * 200, "no score in '...xxx"),
    ],
)
def test_no_score(reply: str, why: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_score(reply, UNIT)
    assert str(caught.value).startswith(why)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        ("[1, 0.5, 0]", [1.0, 0.5, 0.0]),
        ("See [1], then:\n```json\n[1, null, 0]\n```", [1.0, None, 0.0]),
        ('{"scores": [1, 1, 0.5]}', [1.0, 1.0, 0.5]),
        ("Step 1: 1\nStep 2: 0.5\n- **Step 3**: 0.", [1.0, 0.5, 0.0]),
        ("step 1 score: 1\nwhich is fine\nStep 2 = 0\nStep 3 - .25", [1.0, 0.0, 0.25]),
        ("<think>[0, 0, 0]</think>[1, 1, 1]", [1.0, 1.0, 1.0]),
    ],
)
def test_scores_of_steps(reply: str, scores: list[float | None]) -> None:
    assert read_steps(reply, 3, UNIT) == scores


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("fine", "no scores in 'fine'"),
        ("[]", "no scores in '[]'"),
        ("[1, 0]", "2 scores for 3 steps in '[1, 0]'"),
        ("[1, 0, 1, 1]", "4 scores for 3 steps"),
        ("[1, 0, 1]\nand in short [1, 1]", "2 scores for 3 steps"),
        ("[1, 0, 2]", "2 is not between 0 and 1"),
        ('["1", "0", "1"]', "no scores in"),
        ("[[1, 0, 1]]", "no scores in"),
        ("Step 1: 1\nStep 3: 1\nStep 2: 0", "scores for steps 1, 3, 2 in"),
        ("Step 1: 1\nStep 1: 0\nStep 2: 0", "scores for steps 1, 1, 2 in"),
        ("Step 1: 1\nStep 2: 0", "2 scores for 3 steps"),
        ("Step 1: 1 apple\nStep 2: good", "no scores in"),
    ],
)
def test_no_scores_of_steps(reply: str, why: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_steps(reply, 3, UNIT)
    assert str(caught.value).startswith(why)


def test_a_pattern_of_ones_own_and_other_bounds() -> None:
    ten = Bounds(0.0, 10.0)
    assert read_score("I give it <7> or <8>", ten, r"<(\d+)>") == 8.0
    assert read_steps("<7> <8>", 2, ten, r"<(\d+)>") == [7.0, 8.0]
    with pytest.raises(UnreadableError, match="'good' is no number"):
        read_score("<good>", ten, r"<(\w+)>")
    with pytest.raises(UnreadableError, match="1 scores for 2 steps"):
        read_steps("<7> [1, 2]", 2, ten, r"<(\d+)>")
    with pytest.raises(UnreadableError, match="11 is not between 0 and 10"):
        read_score("<11>", ten, r"<(\d+)>")


@given(st.text(st.sampled_from('[]{}",:0.1- scoreSTEPtp\n<think/>'), max_size=60))
def test_any_reply_is_read_or_refused(reply: str) -> None:
    for read in (lambda: [read_score(reply, UNIT)], lambda: read_steps(reply, 2, UNIT)):
        try:
            scores = read()
        except UnreadableError:
            continue
        assert all(score is None or 0 <= score <= 1 for score in scores)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_what_is_said_is_what_is_read(scores: list[float]) -> None:
    assert read_steps(f"Good.\n{scores}", len(scores), UNIT) == scores
    assert read_score(f'{{"score": {scores[0]}}}', UNIT) == scores[0]
