"""The choice of a token by a number, and vLLM's cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolegraph.interfaces import SamplingParams
from roles.rollout.draws import Draws, choose

pytestmark = pytest.mark.engine


def test_each_number_falls_on_its_token_and_never_on_one_without_a_probability() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(5, 1)
    numbers = torch.tensor([0.0, 0.49, 0.5, 0.99, 1.0 - 2**-53], dtype=torch.float64)
    assert choose(probabilities, numbers).tolist() == [1, 1, 3, 3, 3]


def test_tokens_come_as_often_as_the_model_says() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    numbers = torch.from_numpy(np.random.default_rng(0).random(20_000))
    counts = torch.bincount(choose(probabilities.repeat(20_000, 1), numbers), minlength=3) / 20_000
    assert torch.allclose(counts, probabilities, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.75}, [0, 1]),
        ({"min_p": 0.25}, [0, 1]),
        ({"min_p": 0.6}, [0]),
        ({"temperature": 0.0}, [0]),
    ],
)
def test_what_is_cut_is_never_drawn_and_the_rest_is_renormalised(settings: dict[str, float], kept: list[int]) -> None:
    probabilities = torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0])
    numbers = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    scores = probabilities.log().repeat(200, 1)
    scores[:, 4] = 5.0  # the likeliest by far, and beyond the limit
    tokens, logprobs = Draws(SamplingParams(**settings), 4)(scores, numbers)
    assert sorted(set(tokens.tolist())) == kept
    total = 1.0 if settings == {"temperature": 0.0} else float(probabilities[kept].sum())
    assert torch.allclose(logprobs, (probabilities[tokens] / total).log(), atol=1e-5)
