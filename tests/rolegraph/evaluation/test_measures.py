"""pass@k and mean@k: against counting, and where rewards are missing."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from rolegraph.evaluation.config import Measure, measure
from rolegraph.evaluation.measures import of_rewards, pass_at_k

NAN = float("nan")


def counted(n: int, c: int, k: int) -> float:
    """The share of all choices of k among n responses in which one of the c that pass is."""
    choices = list(combinations(range(n), k))
    return sum(any(each < c for each in choice) for choice in choices) / len(choices)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_that_pass(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(counted(n, c, k), abs=1e-12), (n, c, k)


def test_pass_at_k_of_fewer_than_k_is_unknown() -> None:
    assert math.isnan(pass_at_k(3, 2, 4))


def test_large_numbers_do_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_measures_are_means_over_prompts() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = of_rewards(rewards, [Measure("pass", 1), Measure("pass", 2), Measure("mean", 4), Measure("mean", 1)], 1.0)
    assert found == {
        "pass@1": pytest.approx((0.25 + 0.5 + 0) / 3),
        "pass@2": pytest.approx((counted(4, 1, 2) + counted(4, 2, 2)) / 3),
        "mean@4": pytest.approx((0.25 + 0.5 + 0) / 3),
        "mean@1": pytest.approx(1 / 3),
    }


def test_the_threshold_says_what_passes() -> None:
    rewards = np.array([[0.5, 0.1 + 0.2, 0.29]])
    assert of_rewards(rewards, [Measure("mean", 3)], 0.3) == {"mean@3": pytest.approx(2 / 3)}
    assert of_rewards(np.array([[-1.0]]), [Measure("mean", 1)], -2.0) == {"mean@1": 1.0}


def test_a_response_without_a_reward_counts_neither_way() -> None:
    rewards = np.array([[NAN, 1.0, 0.0], [NAN, NAN, 1.0]])
    found = of_rewards(rewards, [Measure("pass", 2), Measure("mean", 2), Measure("pass", 1)], -5.0)
    assert found["pass@2"] == 1.0, "the second prompt has one response left"
    assert found["mean@2"] == 1.0, "of the second prompt's first two responses none has a reward"
    assert found["pass@1"] == 1.0
    assert math.isnan(of_rewards(np.array([[NAN]]), [Measure("pass", 1)], 1.0)["pass@1"])


@pytest.mark.parametrize("word", ["pass@0", "pass@", "pass", "best@2", "pass@2 ", "Pass@2", "pass@1.5"])
def test_words_that_are_no_measure(word: str) -> None:
    assert measure(word) is None
