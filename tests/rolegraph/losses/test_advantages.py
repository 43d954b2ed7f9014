"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.losses.advantages import EPSILON, compute, group_statistics

NAN = float("nan")


def values(rewards: list[float], groups: list[int], **options: str) -> list[float]:
    return list(compute(np.array(rewards), np.array(groups), **options).values)  # type: ignore[arg-type]


REWARDS, GROUPS = [1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1]
STD = (0.5**0.5, 2.0**0.5)
"""Group means are 0.5 and 4, with these standard deviations."""
BATCH_STD = (sum((r - 2.25) ** 2 for r in REWARDS) / 3) ** 0.5


@pytest.mark.parametrize(
    ("estimator", "scale", "expected"),
    [
        ("grpo", "none", [0.5, -0.5, -1.0, 1.0]),
        ("grpo", "group", [0.5 / STD[0], -0.5 / STD[0], -1 / STD[1], 1 / STD[1]]),
        ("grpo", "batch", [0.5 / BATCH_STD, -0.5 / BATCH_STD, -1 / BATCH_STD, 1 / BATCH_STD]),
        ("rloo", "none", [1.0, -1.0, -2.0, 2.0]),
        ("rloo", "group", [1 / STD[0], -1 / STD[0], -2 / STD[1], 2 / STD[1]]),
        ("rloo", "batch", [1 / BATCH_STD, -1 / BATCH_STD, -2 / BATCH_STD, 2 / BATCH_STD]),
        ("reinforce_plus_plus", "none", [-1.25, -2.25, 0.75, 2.75]),
        ("reinforce_plus_plus", "batch", [x / BATCH_STD for x in (-1.25, -2.25, 0.75, 2.75)]),
    ],
)
def test_by_hand(estimator: str, scale: str, expected: list[float]) -> None:
    assert values(REWARDS, GROUPS, estimator=estimator, scale=scale) == pytest.approx(expected, rel=2 * EPSILON)


def test_epsilon_is_added_to_the_deviation() -> None:
    assert values([1.0, 0.0], [0, 0]) == pytest.approx([0.5 / (STD[0] + 1e-4), -0.5 / (STD[0] + 1e-4)], rel=1e-12)


def test_three_samples_leave_one_out() -> None:
    assert values([3.0, 0.0, 6.0], [7, 7, 7], estimator="rloo", scale="none") == pytest.approx([0.0, -4.5, 4.5])


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rounding_residue_is_no_spread(estimator: str, scale: str) -> None:
    residue = [0.1 + 0.2, 0.3, 0.3]
    assert residue[0] != residue[1]
    assert values(residue, [0, 0, 0], estimator=estimator, scale=scale) == [0.0, 0.0, 0.0]
    assert values([0.1 + 0.2 - 0.3, 0.0], [0, 0], estimator=estimator, scale=scale) == [0.0, 0.0]
    assert values([1e12 / 3, 1e12 / 3 * (1 + 1e-15)], [0, 0], estimator=estimator, scale=scale) == [0.0, 0.0]


def test_small_but_real_spread_counts() -> None:
    assert values([0.0, 1e-6], [0, 0], scale="none") == pytest.approx([-5e-7, 5e-7])


def test_a_group_without_spread_is_zero_beside_one_with() -> None:
    result = compute(np.array([2.0, 2.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), scale="batch")
    assert list(result.values[:2]) == [0.0, 0.0]
    assert result.values[3] > 0
    assert result.groups.equal.sum() == 1


@pytest.mark.parametrize("fault", [NAN, float("inf"), -float("inf")])
def test_missing_rewards_leave_the_statistics_alone(fault: float) -> None:
    with_fault = compute(np.array([1.0, fault, 0.0, 3.0, 5.0]), np.array([0, 0, 0, 1, 1]), scale="batch")
    without = compute(np.array(REWARDS), np.array(GROUPS), scale="batch")
    assert list(with_fault.values[[0, 2, 3, 4]]) == list(without.values)
    assert with_fault.values[1] == 0.0
    assert list(with_fault.valid) == [True, False, True, True, True]
    assert (~with_fault.valid).sum() == 1


def test_a_group_with_no_reward_is_named() -> None:
    result = compute(np.array([NAN, NAN, 1.0, 0.0, 4.0, NAN]), np.array([5, 5, 2, 2, 9, 9]))
    assert list(result.groups.empty) == [5]
    assert not result.valid[:2].any()
    assert result.values[4] == 0.0, "the only reward of its group has nothing to be compared with"
    assert result.groups.equal.sum() == 1


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_no_rows_and_no_rewards(estimator: str, scale: str) -> None:
    assert values([], [], estimator=estimator, scale=scale) == []
    assert values([NAN, NAN], [0, 1], estimator=estimator, scale=scale) == [0.0, 0.0]
    assert values([1.0], [0], estimator=estimator, scale=scale) == [0.0]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3) | st.just(NAN), st.integers(0, 4)), max_size=30), st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[tuple[float, int]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rewards, groups = np.array([r for r, _ in rows], dtype=float), np.array([g for _, g in rows], dtype=int)
    straight = compute(rewards, groups)
    shuffled = compute(rewards[order], groups[order])
    assert np.isfinite(straight.values).all()
    assert shuffled.values == pytest.approx(straight.values[order], abs=1e-9, rel=1e-6)
    sums = np.bincount(straight.groups.of_row, straight.values, len(straight.groups.ids))
    assert sums == pytest.approx(0.0, abs=1e-6), "advantages of a group sum to zero"


def test_group_statistics() -> None:
    stats = group_statistics(np.array([1.0, 2.0, NAN, 4.0]), np.array([3, 3, 3, 1]))
    assert list(stats.ids) == [1, 3]
    assert list(stats.count) == [1, 2]
    assert list(stats.mean) == [4.0, 1.5]
    assert list(stats.std) == pytest.approx([0.0, 0.5**0.5])
    assert list(stats.spread) == [False, True]
