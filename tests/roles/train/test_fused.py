"""The passes over memory that were saved change no value and no gradient: each function beside its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from roles.train import fused


def same(ours: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and gradients, in double precision."""
    first = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    second = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    one, two = ours(*first), formula(*second)
    torch.testing.assert_close(one, two)
    # A gradient with another layout in memory than its tensor, as attention gives it.
    slope = torch.randn(*one.shape[::-1], dtype=one.dtype).permute(*range(one.dim() - 1, -1, -1))
    one.backward(slope)
    two.backward(slope)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(5, 2, 12), (5, 1, 3, 4), (1, 1, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    hidden, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    same(lambda x, w: fused.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (shape[-1],), w, 1e-3), hidden, weight)


def test_swiglu() -> None:
    gate_up = torch.randn(5, 2, 16, dtype=torch.float64)
    same(fused.swiglu, lambda x: F.silu(x[..., :8]) * x[..., 8:], gate_up)


@pytest.mark.parametrize("width", [8, 12])
def test_rotary(width: int) -> None:
    states = torch.randn(6, 2, 3, width, dtype=torch.float64)
    half = torch.rand(6, 1, 1, 4, dtype=torch.float64) * 7
    angles = torch.cat([half, half], dim=-1)

    def formula(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., 4:8], x[..., :4]], dim=-1)
        return torch.cat([x[..., :8] * angles.cos() + turned * angles.sin(), x[..., 8:]], dim=-1)

    same(lambda x: fused.rotary(x, angles), formula, states)
    other = angles + 1
    assert not torch.equal(fused.rotary(states, other), fused.rotary(states, angles))
