"""Arithmetic in a step: what is right, what is wrong, and what is left alone because it may be neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.rewards.step_functions import arithmetic_steps, equations


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("So 2 + 3 = 5, then 5 * 4 = 21.", [True, False]),
        ("What is -62 - 24 + 6? -62 - 24 = -86, and -86 + 6 = -80.", [True, True]),
        ("x = 3 + 4 = 8", [False]),
        ("1. 2 + 3 = 5\n2) 5 - 7 = 2", [True, False]),
        (" **2 + 3 = 6**.", [False]),
        ("2 ** 3 = 8 and 2^3 = 9", [True, False]),
        (r"\( 3 \times 4 = \boxed{12} \), $\frac{10}{4} = 2.5$", [True, True]),
        ("3 x 4 = 13", [False]),
        ("48/2 = <<48/2=24>>24 clips", [True]),
        ("1,200 + 300 = 1,500", [True]),
        ("$5 + $6 = $11", [True]),
        ("50% * 80 = 40", [True]),
        ("(1 + 2) * 3 = 9", [True]),
        # As far as it goes.
        ("10 / 3 = 3.33", [True]),
        ("10 / 3 = 3.34", [False]),
        ("10 / 3 = 3", [False]),
        ("1/3 = 33.3%", [True]),
        ("1/3 = 33%", [True]),
        ("1/3 = 35%", [False]),
    ],
)
def test_equations_between_numbers_are_checked(text: str, holds: list[bool]) -> None:
    assert equations(text) == holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x - 3 = 5",
        "2x = 4 + 1",
        "4 + 4 = 9x",
        "f(2) + 1 = 4",
        "20% of 80 = 16",
        "half of 8 + 2 = 6",
        "5 apples + 3 apples = 9 apples",
        "5 cm * 3 cm = 16 cm",
        "Step 5 = 6",
        "2 + 3 != 6",
        "2 + 3 == 6",
        "2 + 3 >= 6",
        "1/0 = 3",
        "9**9**9 = 3",
        "- 3 + 4 = 7",
        "(" * 140 + "1" + " = 2 + 2",
        "1 + " * 200 + "1 = 2",
    ],
)
def test_what_is_no_arithmetic_is_passed_over(text: str) -> None:
    assert equations(text) == []


@given(st.text(st.sampled_from("0123456789.,+-*/^()= x%$\\{}ab\n"), max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    equations(text)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"), st.integers(-3, 3))
def test_sums_are_right_or_wrong(a: int, b: int, sign: str, off: int) -> None:
    value = {"+": a + b, "-": a - b, "*": a * b}[sign] + off
    assert equations(f"so ({a}) {sign} ({b}) = {value}") == [off == 0]


def test_a_step_without_equations_has_the_score_it_is_given() -> None:
    steps = [["Let us see.", "2 + 2 = 4"], ["2 + 2 = 5, 1 + 1 = 2"], []]
    assert arithmetic_steps(steps) == [[1.0, 1.0], [0.0], []]
    assert arithmetic_steps(steps, no_equation=None) == [[None, 1.0], [0.0], []]
