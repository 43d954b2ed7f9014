"""Rewards of single steps: hand-computed numbers, and the same from every split over ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import pytest
import torch

from rolegraph.losses.policy import STEPS, PolicyLoss
from rolegraph.losses.steps import normalised
from rolegraph.losses.types import Reduce, Steps, TokenBatch
from tests.rolegraph.losses.batches import Row, batch, combine


@dataclass
class Response:
    """So many tokens, the scores of its steps and where each of them ends."""

    group: int
    tokens: int
    scores: list[float]
    ends: list[int]
    advantage: float = 0.0


ONE = Response(0, 4, [1.0, 0.0], [2, 4])
TWO = Response(0, 3, [0.5], [3])
OTHER = Response(1, 2, [0.5, 0.5], [1, 2])
RESPONSES = [ONE, TWO, OTHER]


def tokens_of(responses: Sequence[Response]) -> TokenBatch:
    rows = [
        Row([-1.0] * each.tokens, per_row={"advantage": each.advantage, "group": float(each.group)})
        for each in responses
    ]
    made = batch(rows)
    starts = [sum(each.tokens for each in responses[:i]) for i in range(len(responses))]
    last: list[int] = []
    for start, each in zip(starts, responses, strict=True):
        last += [
            start + end - 1 if end > before else -1 for before, end in zip([0, *each.ends], each.ends, strict=False)
        ]
    steps = Steps(
        torch.tensor([score for each in responses for score in each.scores], dtype=torch.float64),
        torch.tensor([row for row, each in enumerate(responses) for _ in each.scores], dtype=torch.int64),
        torch.tensor(last, dtype=torch.int64),
    )
    return replace(made, steps=steps)


def advantages(responses: Sequence[Response], **options: Any) -> list[float]:
    loss, tokens = PolicyLoss(**{"step_scale": "none", **options}), tokens_of(responses)
    return loss.advantages(tokens.with_columns(loss.prepare(tokens, Reduce()))).tolist()


def test_a_token_has_the_steps_that_end_at_it_or_later() -> None:
    # The group's mean is 0.5: the steps are worth +0.5, -0.5 and 0; the other group has no spread.
    assert advantages(RESPONSES) == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    rising = [replace(ONE, scores=[0.0, 1.0]), TWO]
    assert advantages(rising) == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0]


def test_both_rewards_add_up_and_the_steps_have_a_weight() -> None:
    rows = [replace(ONE, advantage=1.0), replace(TWO, advantage=-1.0)]
    assert advantages(rows, step_weight=2.0) == [1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0]


def test_a_step_may_end_at_a_token_of_somebody_else() -> None:
    tokens = tokens_of([ONE, TWO])
    masked = replace(tokens, mask=torch.tensor([1, 0, 0, 1, 1, 1, 0], dtype=torch.float64))
    loss = PolicyLoss(step_scale="none")
    assert loss.prepare(masked, Reduce())[STEPS].tolist() == loss.prepare(tokens, Reduce())[STEPS].tolist()


def test_scales() -> None:
    group = statistics.stdev([1.0, 0.0, 0.5]) + 1e-4
    whole = statistics.stdev([1.0, 0.0, 0.5, 0.5, 0.5]) + 1e-4
    assert advantages(RESPONSES, step_scale="group")[2] == pytest.approx(-0.5 / group)
    assert advantages(RESPONSES, step_scale="batch")[2] == pytest.approx(-0.5 / whole)


def test_steps_without_a_score_or_without_tokens_are_left_out() -> None:
    unknown = [replace(ONE, scores=[1.0, nan]), replace(TWO, scores=[0.0])]
    assert advantages(unknown) == [0.5, 0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    empty = [Response(0, 2, [1.0, 0.0], [0, 2]), Response(0, 1, [], [])]
    assert advantages(empty) == [-0.5, -0.5, 0.0], "an empty step counts in the group's mean"
    assert advantages([replace(ONE, scores=[nan, nan])]) == [0.0] * 4
    assert advantages([replace(ONE, scores=[], ends=[])]) == [0.0] * 4


def test_rounding_residue_is_no_spread() -> None:
    equal = [replace(ONE, scores=[0.1 + 0.2, 0.3]), replace(TWO, scores=[0.3])]
    assert advantages(equal, step_scale="group") == [0.0] * 7


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_ranks_agree_with_one(scale: Any) -> None:
    scores = torch.tensor([1.0, 0.0, nan, 0.5, 0.25, 0.75, 0.3], dtype=torch.float64)
    group = torch.tensor([4, 4, 4, 4, 9, 9, 9])
    whole = normalised(scores, group, scale, Reduce())
    cut = [slice(0, 2), slice(2, 2), slice(2, 7)]  # the first group is on two ranks, and one rank has no step
    there = [torch.isfinite(scores[part]) for part in cut]
    gathered = iter(
        [
            *[[scores[part][mask] for part, mask in zip(cut, there, strict=True)]],
            *[[group[part][mask].double() for part, mask in zip(cut, there, strict=True)]],
        ]
        * len(cut)
    )
    reduce = Reduce(gather=lambda value: combine("gather", next(gathered)))
    parts = [normalised(scores[part], group[part], scale, reduce) for part in cut]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-15)
    assert whole[2] == 0


def test_what_is_missing_is_named() -> None:
    tokens = replace(tokens_of(RESPONSES), steps=None)
    with pytest.raises(KeyError, match="step_scale needs the columns 'step_scores' and 'step_ends': let a prm score"):
        PolicyLoss(step_scale="group").prepare(tokens, Reduce())
    assert STEPS not in PolicyLoss().prepare(tokens_of(RESPONSES), Reduce()), "nobody asked for it"
