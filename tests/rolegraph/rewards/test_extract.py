"""Where an answer stands in a response: the odd cases."""

from __future__ import annotations

import pytest

from rolegraph.rewards.extract import Extract, after_thinking, extract


@pytest.mark.parametrize(
    ("where", "text", "answer"),
    [
        ("text", "  the whole\ntext ", "the whole\ntext"),
        ("answer", "<answer>3</answer> no, wait: <answer> 4 </answer>!", "4"),
        ("answer", "<answer>1 <answer>2</answer>", "2"),
        ("answer", "<answer>two\nwords and more</answer>", "two\nwords and more"),
        ("answer", "<answer>cut off", None),
        ("answer", "</answer>", None),
        ("answer", "<answer>kept</answer> and <answer>cut off", "kept"),
        ("answer", "<answer></answer>", ""),
        ("answer", "", None),
        ("boxed", r"so \boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} or rather \boxed{\text{two words}}", r"\text{two words}"),
        ("boxed", r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        ("boxed", r"\boxed{\}}", r"\}"),
        ("boxed", r"\boxed{3} then \boxed{\frac{1}{2", "3"),
        ("boxed", r"\boxed 7, done", "7"),
        ("boxed", r"\fbox{8}", "8"),
        ("boxed", "no box", None),
        ("number", "first 3, then 4.", "4"),
        ("number", "it is 1,234.5", "1234.5"),
        ("number", "a list 1,2,3", "3"),
        ("number", "the range 3-4", "4"),
        ("number", "minus: -7", "-7"),
        ("number", "minus: \u22127", "-7"),
        ("number", "plus +7", "7"),
        ("number", "half: 1/2", "1/2"),
        ("number", "tiny 1e-5", "1e-5"),
        ("number", "about .5", ".5"),
        ("number", "costs $1,000", "1000"),
        ("number", "12,34", "34"),
        ("number", "1,2345", "2345"),
        ("number", "version v2 of x3", None),
        ("number", "none at all", None),
        ("last_line", "work\n\nanswer: six \n\n", "answer: six"),
        ("last_line", " \n ", None),
        ("auto", "<think>\\boxed{1} <answer>2</answer></think>\\boxed{3}", "3"),
        ("auto", "<think>x</think> <answer>4</answer> \\boxed{5}", "4"),
        ("auto", "just\nthis", "just\nthis"),
        ("auto", "<think>never ended, 5", None),
        ("auto", "thought that began in the prompt</think>6", "6"),
        ("auto", "   ", None),
    ],
)
def test_answer(where: Extract, text: str, answer: str | None) -> None:
    assert extract(text, where) == answer


def test_an_unknown_place_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"extract='box'.*boxed"):
        extract("1", "box")  # type: ignore[arg-type]


def test_only_what_follows_the_last_thought_counts() -> None:
    assert after_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert after_thinking("no thoughts") == "no thoughts"
