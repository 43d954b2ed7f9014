"""Operators that vLLM has in C for CPUs but does not choose there, offered to its operator registry under `PROVIDER`.

vLLM normalises on a CPU by seven torch operators. On the 64 x 128 activations of a decoding step each costs more in
dispatch than in arithmetic: a small model spends a quarter of its time in them. `arguments.py` puts `PROVIDER` first in
vLLM's list of implementations (`ir_op_priority`); the worker extension imports this module in every worker.
"""

from __future__ import annotations

import logging

import torch
from vllm import ir
from vllm.platforms import current_platform

log = logging.getLogger(__name__)

PROVIDER = "rolegraph"
OPERATORS = ("rms_norm", "fused_add_rms_norm")
_WIDTH = 16
"""The kernels take whole vectors: 16 entries are one in every type."""
_TOLERANCE = 1e-5


def _fits(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _WIDTH == 0
    )  # fmt: skip


def _takes(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _fits(x, weight, variance_size)


def _takes_residual(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _fits(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


# vLLM compares these signatures, as they are evaluated, with those of its own implementation; it refuses another one.
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _agree() -> bool:
    """Whether the C operators are there and compute what vLLM's own torch code does, on rows of two widths."""
    draw = torch.Generator().manual_seed(0)
    for width in (_WIDTH, 8 * _WIDTH):
        x, residual = torch.randn(2, 3, width, generator=draw)
        weight = torch.randn(width, generator=draw)
        wanted = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
        wanted_sum = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, 1e-6)
        try:
            found = [_rms_norm(x, weight, 1e-6), *_fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)]
        except (AttributeError, RuntimeError) as error:
            log.warning("vLLM's C kernels for CPUs are not used: %s", error)
            return False
        pairs = zip(found, [wanted, *wanted_sum], strict=True)
        worst = max(float((one - two).abs().max()) for one, two in pairs)
        if not worst <= _TOLERANCE:
            log.warning("vLLM's C kernels for CPUs are not used: a norm is off by %.1e", worst)
            return False
    return True


def register() -> bool:
    """Offer the operators to vLLM, once a process; False where this vLLM's kernels are not usable.

    Raises ValueError where vLLM gave its operators another signature.
    """
    if PROVIDER not in ir.ops.rms_norm.impls:
        current_platform.import_kernels()
        usable = current_platform.is_cpu() and _agree()
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes, supported=usable)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(
            PROVIDER, supports_args=_takes_residual, supported=usable, inplace=True
        )(_fused_add_rms_norm)
    return all(bool(getattr(ir.ops, name).impls[PROVIDER].supported) for name in OPERATORS)


register()
