"""The built-in reward functions, by hand-made responses."""

from __future__ import annotations

import json
import threading

import pytest

from rolegraph.rewards.functions import (
    exact_match,
    format,
    length_penalty,
    math_equivalence,
    reasoning_gym,
    regex,
    soft_overlong,
)


def test_exact_match_compares_the_extracted_answer_as_text() -> None:
    assert exact_match(["<answer> New  York </answer>", "new york", ""], answer=["New York"] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(["new york"], answer=["New York"], ignore_case=True) == [1.0]
    assert exact_match(["it is 7"], answer=[7.0], extract_from="number") == [1.0]
    assert exact_match(["7", "7"], answer=[7, None]) == [1.0, None]
    assert exact_match(["anything"], answer=[""]) == [0.0]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"So the answer is $\frac{2}{4}$.", "0.5", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("<think>2 + 2 is 5?</think> <answer>4.0</answer>", "4", 1.0),
        ("<answer>x^2 + 2x + 1</answer>", "$(x+1)^2$", 1.0),
        ("<answer>1,234</answer>", "1234", 1.0),
        ("the answer is 72", "She sold 72 clips.\n#### 72", 1.0),
        ("<answer>3</answer> but the number 4", "4", 0.0),
        ("<think>it must be 4", "4", 0.0),
        ("", "4", 0.0),
        ("no idea", "4", 0.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        ("<answer>x^2 + 2x + 4</answer>", "4", 0.0),
        ("4", "x^2 + 2x + 4", 0.0),
        ("2x + 4", "4 + 2*x", 1.0),
        (r"<answer>\frac{3}{4}</answer>", "0.75", 1.0),
        ("<answer>The answer is 4</answer>", "4", 1.0),
        ("50%", r"50\%", 1.0),
        ("-12", "-12", 1.0),
        ("12", "-12", 0.0),
        ("72", "72 clips", 1.0),
        ("4", "", None),
        ("4", None, None),
    ],
)
def test_math_equivalence(response: str, answer: str | None, score: float | None) -> None:
    assert math_equivalence([response], answer=[answer]) == [score]


def test_math_equivalence_extracts_where_it_is_told() -> None:
    text = r"<answer>3</answer> \boxed{4}"
    assert math_equivalence([text] * 2, answer=["3", "4"], extract_from="answer") == [1.0, 0.0]
    assert math_equivalence([text] * 2, answer=["3", "4"], extract_from="boxed") == [0.0, 1.0]


def test_math_equivalence_needs_no_main_thread() -> None:
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.extend(math_equivalence(["$1/2$"], answer=["0.5"])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_format_is_of_the_whole_response_and_each_tag_once() -> None:
    good = "<think>a\nb</think>\n<answer>4</answer>\n"
    twice = "<think>a</think><answer>1</answer><answer>2</answer>"
    nested = "<think>a<think>b</think><answer>1</answer>"
    assert format([good, f"so {good}", f"{good} so", twice, nested, "<answer>4</answer>"]) == [1.0, 0, 0, 0, 0, 0]
    assert format(["a</think><answer>1</answer>", good], think_in_prompt=True) == [1.0, 0.0]
    assert format(["12", "12a"], pattern=r"\d+") == [1.0, 0.0]


def test_regex_by_setting_and_by_row() -> None:
    assert regex(["an Ape", "b"], pattern="ape") == [0.0, 0.0]
    assert regex(["an Ape", "b"], pattern="ape", ignore_case=True) == [1.0, 0.0]
    assert regex(["a", "ab"], pattern="a", mode="fullmatch") == [1.0, 0.0]
    assert regex(["a", "a", "a"], pattern=["a", "b", None]) == [1.0, 0.0, None]
    assert regex(["<answer>7</answer> 8"], pattern="8", extract_from="answer") == [0.0]


def test_reasoning_gym_asks_the_task_of_the_row() -> None:
    from reasoning_gym import create_dataset

    names = ["chain_sum", "spell_backward"]
    items = [create_dataset(name, size=1, seed=3)[0] for name in names]
    entries = [json.dumps(item) for item in items]
    right = [f"<think>hm</think><answer>{item['answer']}</answer>" for item in items]
    assert reasoning_gym(right, task=names, entry=entries) == [1.0, 1.0]
    assert reasoning_gym(["", "<think>cut"], task=names, entry=entries) == [0.0, 0.0]
    near = [f"{item['answer']} or so" for item in items[:1]]
    assert 0 < reasoning_gym(near, task=names[:1], entry=items[:1])[0] < 1
    assert reasoning_gym(near, task=names[:1], entry=items[:1], partial=False) == [0.0]
    with pytest.raises(ValueError, match="no task 'chain_sun'"):
        reasoning_gym(["1"], task=["chain_sun"], entry=entries[:1])


def test_soft_overlong_falls_over_the_last_tokens() -> None:
    lengths = (0, 6, 8, 10, 12, None)
    expected = [0.0, 0.0, -0.5, -1.0, -1.0, None]
    assert soft_overlong([""] * 6, response_length=lengths, max_length=10, cache=4) == expected


def test_length_penalty_is_free_at_first_and_bounded() -> None:
    lengths = (0, 10, 14, 1000, None)
    scores = length_penalty([""] * 5, response_length=lengths, per_token=0.01, free=10, floor=-0.5)
    assert scores == [0.0, 0.0, pytest.approx(-0.04), -0.5, None]
