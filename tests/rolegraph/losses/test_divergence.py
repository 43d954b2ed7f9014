"""The divergences of given logits: formula, ends, gradient, padding, properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolegraph.losses.config import beta_near_end
from rolegraph.losses.divergence import generalized_jsd
from tests.rolegraph.losses.divergences import BETAS, full


def pair(tokens: int = 23, vocab: int = 211, *, scale: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, vocab, generator=generator) * scale
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("beta", BETAS)
def test_equals_the_formula_in_double_precision(beta: float, temperature: float) -> None:
    student, teacher = pair()
    precise = student.detach().double().requires_grad_()
    upstream = torch.linspace(-1.0, 2.0, len(student))
    found = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    expected = full(precise, teacher, beta, temperature, 211)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(found, student, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, precise, upstream.double())
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=5e-6, rtol=1e-5)
    in_double = generalized_jsd(precise, teacher.double(), beta=beta, temperature=temperature)
    torch.testing.assert_close(in_double, expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta: float) -> None:
    student, teacher = (x.detach().double() for x in pair(3, 17))
    assert torch.autograd.gradcheck(
        lambda x: generalized_jsd(x, teacher, beta=beta, temperature=0.7, vocab_size=15), student.requires_grad_()
    )


@pytest.mark.parametrize("beta", BETAS)
def test_logits_of_different_widths_are_compared_over_the_common_ids(beta: float) -> None:
    student, teacher = pair()
    wide = torch.cat([teacher, torch.full((len(teacher), 13), 50.0)], dim=-1)
    expected = full(student, teacher, beta, 1.0, 200)
    found = generalized_jsd(student, wide, beta=beta, vocab_size=200)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert torch.equal(gradient[:, 200:], torch.zeros_like(gradient[:, 200:]))
    assert gradient[:, :200].abs().min() > 0
    up_to_the_narrower = generalized_jsd(student, wide, beta=beta).double()
    torch.testing.assert_close(up_to_the_narrower, full(student, teacher, beta, 1.0, 211), atol=1e-6, rtol=1e-6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    beta=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.93, 1.0]),
    vocab=st.integers(1, 70),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_never_negative_bounded_and_zero_for_equal_distributions(
    seed: int, beta: float, vocab: int, scale: float, temperature: float
) -> None:
    student, teacher = pair(5, vocab, scale=scale, seed=seed)
    found = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    assert found.isfinite().all()
    assert found.min() >= -2e-7
    if 0.0 < beta < 1.0:
        # The information a draw from the mixture gives about its side; 3e-5 is the rounding of logits of 300.
        assert found.max() <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 3e-5
    assert torch.equal(generalized_jsd(teacher, teacher, beta=beta, temperature=temperature), torch.zeros(5))
    # An added constant, different for each token, is the same distribution.
    shift = torch.linspace(-20, 20, 5)[:, None]
    shifted = generalized_jsd(teacher + shift, teacher, beta=beta, temperature=temperature)
    torch.testing.assert_close(shifted, torch.zeros(5), atol=2e-6, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_swapping_the_sides_is_one_minus_beta(beta: float) -> None:
    student, teacher = pair()
    swapped = generalized_jsd(teacher, student, beta=1.0 - beta)
    torch.testing.assert_close(generalized_jsd(student, teacher, beta=beta), swapped, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_logits_are_not_cut(beta: float) -> None:
    """Distributions without a common token: the KLs are as large as they are, the mixture's value is its bound."""
    student = torch.zeros(1, 4)
    student[0, 0], teacher = 300.0, torch.tensor([[0.0, 300.0, 0.0, 0.0]])
    student.requires_grad_()
    found = generalized_jsd(student, teacher, beta=beta)
    torch.testing.assert_close(found.double(), full(student, teacher, beta, 1.0, 4), atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.isfinite().all()


def test_between_the_ends_it_tends_to_zero() -> None:
    student, teacher = (x.detach().double() for x in pair(scale=0.5))
    forward = generalized_jsd(student, teacher, beta=0.0)
    near = generalized_jsd(student, teacher, beta=1e-4)
    torch.testing.assert_close(near, 1e-4 * forward, rtol=1e-3, atol=0)
    reverse = generalized_jsd(student, teacher, beta=1.0)
    near = generalized_jsd(student, teacher, beta=1 - 1e-4)
    torch.testing.assert_close(near, 1e-4 * reverse, rtol=1e-3, atol=0)


def test_beta_near_an_end_warns_and_says_what_to_write() -> None:
    for beta in (0.0, 0.02, 0.5, 0.98, 1.0):
        assert beta_near_end("algorithm.beta", beta) is None
    low, high = beta_near_end("algorithm.beta", 0.005), beta_near_end("algorithm.beta", 0.995)
    assert low is not None
    assert high is not None
    assert "algorithm.beta=0.005" in low
    assert low.endswith("For the forward KL itself write algorithm.beta=0")
    assert high.endswith("For the reverse KL itself write algorithm.beta=1")


def test_bfloat16_logits_are_computed_in_float32() -> None:
    student, teacher = (x.detach().bfloat16() for x in pair())
    found = generalized_jsd(student.requires_grad_(), teacher, beta=0.3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), full(student, teacher, 0.3, 1.0, 211), atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.dtype == torch.bfloat16
    precise = student.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(full(precise, teacher, 0.3, 1.0, 211).sum(), precise)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-2)


def test_no_tokens() -> None:
    student = torch.zeros(0, 7, requires_grad=True)
    found = generalized_jsd(student, torch.zeros(0, 9), beta=0.5)
    assert found.shape == (0,)
    assert torch.autograd.grad(found.sum(), student)[0].shape == (0, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.2}, r"beta is 1.2; it lies between 0 \(forward KL\) and 1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"temperature": 0.0}, "temperature is 0.0; a divergence needs one above 0"),
        ({"vocab_size": 212}, r"vocab_size is 212, but the smaller of both heads has columns for 0\.\.210"),
    ],
)
def test_refuses(change: dict[str, float], message: str) -> None:
    student, teacher = pair()
    with pytest.raises(ValueError, match=message):
        generalized_jsd(student, teacher, **{"beta": 0.5, **change})  # type: ignore[arg-type]


def test_refuses_a_reply_one_token_short() -> None:
    student, teacher = pair()
    with pytest.raises(ValueError, match="student has 23 tokens and the teacher 22"):
        generalized_jsd(student, teacher[:-1], beta=0.5)
