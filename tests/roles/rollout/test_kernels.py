"""vLLM's C norm on CPUs, against its own torch code."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("shape", [(5, 64), (7, 4, 32), (1, 576)])
def test_norms_are_vllms_own_numbers(shape: tuple[int, ...]) -> None:
    from vllm import ir

    from roles.rollout import kernels

    assert kernels.register()
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    native = ir.ops.rms_norm.impls["native"].impl_fn
    torch.testing.assert_close(
        ir.ops.rms_norm.impls[kernels.PROVIDER].impl_fn(x, weight, 1e-6), native(x, weight, 1e-6)
    )
    # A head's slice of a wider row is not contiguous.
    wide = torch.randn(*shape[:-1], 3 * shape[-1])[..., : shape[-1]]
    torch.testing.assert_close(kernels._rms_norm(wide, weight, 1e-6), native(wide, weight, 1e-6))
    summed = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, 1e-6)
    found = ir.ops.fused_add_rms_norm.impls[kernels.PROVIDER].impl_fn(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(found, summed)


def test_what_the_kernels_do_not_take_is_left_to_vllm() -> None:
    from roles.rollout import kernels

    x, weight = torch.randn(4, 64), torch.ones(64)
    assert kernels._takes(x, weight, 1e-6)
    assert not kernels._takes(x, None, 1e-6)
    assert not kernels._takes(x, weight, 1e-6, 32)
    assert not kernels._takes(x, weight.double(), 1e-6)
    assert not kernels._takes(torch.randn(4, 24), torch.ones(24), 1e-6)
    assert not kernels._takes_residual(x, torch.randn(64, 4).t(), weight, 1e-6)


def test_kernels_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from roles.rollout import kernels

    monkeypatch.setattr(kernels, "_rms_norm", lambda x, weight, epsilon: x)
    with caplog.at_level(logging.WARNING):
        assert not kernels._agree()
    assert "a norm is off by" in caplog.text
