"""Cross-entropy by hand, and losses looked up by name."""

from __future__ import annotations

import sys
import types

import pytest

from rolegraph.interfaces import LossSpec
from rolegraph.losses import resolve
from rolegraph.losses.types import LossOutput, TokenBatch
from tests.rolegraph.losses.batches import Row, run


def test_cross_entropy_is_the_mean_over_the_global_batch() -> None:
    rows = [Row([-1.0, -2.0, -float("inf")], [1, 1, 0]), Row([-6.0]), Row([], [])]
    loss = resolve(LossSpec("rolegraph.losses.supervised.cross_entropy"))
    for parts in ([rows], [rows[:1], rows[1:]]):
        result = run(loss, parts)
        assert result.loss == pytest.approx(3.0)
        assert result.gradient == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3])
        assert result.metrics == pytest.approx({"cross_entropy": 3.0})


def test_nothing_to_learn_from() -> None:
    result = run(resolve(LossSpec("rolegraph.losses.supervised.cross_entropy")), [[Row([-1.0], [0])]])
    assert (result.loss, result.gradient) == (0.0, [0.0])


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_losses")

    def scaled(tokens: TokenBatch, *, scale: float = 1.0) -> LossOutput:
        return LossOutput(-scale * tokens.logprobs.sum())

    scaled.needs_entropy = True  # type: ignore[attr-defined]
    module.scaled = scaled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_losses", module)
    return module


def test_a_function_gets_its_arguments_and_keeps_its_attributes(losses: types.ModuleType) -> None:
    loss = resolve(LossSpec("my_losses.scaled", {"scale": 3.0}))
    assert run(loss, [[Row([-2.0])]]).loss == 6.0
    assert loss.needs_entropy is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", ["my_losses.scalde", "no_such.module.loss", "loss"])
def test_an_unknown_loss_is_named(losses: types.ModuleType, target: str) -> None:
    with pytest.raises(ImportError, match=target):
        resolve(LossSpec(target))


def test_a_wrong_argument_is_named(losses: types.ModuleType) -> None:
    with pytest.raises(TypeError, match=r"my_losses\.scaled.*scal"):
        resolve(LossSpec("my_losses.scaled", {"scal": 3.0}))
