"""Norm, rotary embedding and gated activation with few passes over memory, forward and backward, for CPUs.

A CPU core computes an element far faster than it fetches one, and autograd's own backward of these formulas makes a
fresh tensor an operation. Each function here writes its result in place as far as it goes, and keeps the inputs alone
for the backward. Everything is plain torch, in the type of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        width = hidden.shape[-1]
        scale = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        hidden, weight, scale = ctx.saved_tensors
        width = hidden.shape[-1]
        # With y = x s w and s = (mean(x x) + eps) ** -1/2: dx = s (w dy - x s s mean(w dy x)), dw = sum(dy x s).
        product = torch.mul(grad, hidden, out=torch.empty(hidden.shape, dtype=hidden.dtype)).view(-1, width)
        grad_weight = torch.mv(product.t(), scale.view(-1)) if ctx.needs_input_grad[1] else None
        slope = torch.mv(product, weight).view_as(scale).div_(-width).mul_(scale).mul_(scale)
        # `product` is read: its memory takes the result.
        grad_hidden = torch.mul(grad, weight, out=product.view(hidden.shape))
        return grad_hidden.addcmul_(hidden, slope).mul_(scale), grad_weight, None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden / sqrt(mean(hidden ** 2) + eps) * weight over the last axis, [..., width] (arXiv 1910.07467)."""
    out: Tensor = _RMSNorm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grads


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202); [..., 2 width], the gate first, to [..., width]."""
    out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cosine, sine)
        return _rotate(states, cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        # The transpose of a rotation turns back.
        cosine, sine = ctx.saved_tensors
        return _rotate(grad, cosine, sine, -1.0), None, None


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    half = cosine.shape[-1]
    out = torch.empty(states.shape, dtype=states.dtype)
    first, second = states[..., :half], states[..., half : 2 * half]
    out_first, out_second = out[..., :half], out[..., half : 2 * half]
    torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-sign)
    torch.mul(second, cosine, out=out_second).addcmul_(first, sine, value=sign)
    if states.shape[-1] > 2 * half:
        out[..., 2 * half :] = states[..., 2 * half :]
    return out


def rotary(states: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of the first `rotated` entries of each head, in halves (arXiv 2104.09864, as in GPT-NeoX).

    `states` [seq, batch, heads, width]; `angles` [seq, 1, 1, rotated] in radians, the second half equal to the first.
    """
    cosine, sine = _cosine_and_sine(angles, states.dtype)
    out: Tensor = _Rotary.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
    return out


_last: tuple[Tensor, torch.dtype, Tensor, Tensor] | None = None
"""Cosine and sine of the angles seen last: all layers of a micro-batch ask for the same."""


def _cosine_and_sine(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    global _last
    if _last is None or _last[0] is not angles or _last[1] != dtype:
        half = angles[..., : angles.shape[-1] // 2]
        _last = (angles, dtype, half.cos().to(dtype), half.sin().to(dtype))
    return _last[2], _last[3]
