"""Learning rates by hand."""

from __future__ import annotations

import math

import pytest

from roles.train.schedule import learning_rate


def test_constant_with_warmup() -> None:
    rates = [learning_rate(step, lr=4.0, warmup_steps=3) for step in range(6)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert learning_rate(0, lr=4.0) == 4.0


def test_linear() -> None:
    rates = [learning_rate(step, lr=1.0, schedule="linear", decay_steps=4, min_lr=0.2) for step in range(6)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, lr=1.0, schedule="cosine", warmup_steps=2, decay_steps=10, min_lr=0.1)

    assert [rate(0), rate(1), rate(2)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rate(4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(6) == pytest.approx(0.55)
    assert rate(10) == rate(99) == 0.1


def test_decay_that_ends_within_the_warmup() -> None:
    assert learning_rate(5, lr=1.0, schedule="linear", warmup_steps=5, decay_steps=5, min_lr=0.3) == 0.3


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"train\.decay_steps"):
        learning_rate(1, lr=1.0, schedule="cosine")
    with pytest.raises(ValueError, match="choose constant, linear or cosine"):
        learning_rate(1, lr=1.0, schedule="square")  # type: ignore[arg-type]
