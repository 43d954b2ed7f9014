"""Hidden states times an output head: the types of the GEMMs, and the memory they write to."""

from __future__ import annotations

import torch
from torch import Tensor


def precision(states: Tensor) -> torch.dtype:
    """What logits, softmax and results are computed in."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def operands(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs in the type of the GEMMs: CPUs without bf16 units are 200 times slower in bf16 than in float32."""
    if hidden.device.type == "cpu":
        return hidden.to(precision(hidden)), weight.to(precision(hidden))
    return hidden, weight.to(hidden.dtype)


def project(states: Tensor, rows: Tensor, out: Tensor, *, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """scale * (states @ rows.T + bias), [tokens, columns], in `out`, of the type of `precision`."""
    if states.dtype == out.dtype:
        if bias is None:
            return torch.addmm(out, states, rows.t(), beta=0.0, alpha=scale, out=out)
        return torch.addmm(bias.to(out.dtype), states, rows.t(), beta=scale, alpha=scale, out=out)
    product = torch.mm(states, rows.t(), out_dtype=out.dtype)
    if bias is not None:
        product += bias
    return torch.mul(product, scale, out=out)


def accumulate(total: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """total += left @ right, summed in the type of `total`; `first` overwrites what is there."""
    if left.dtype != total.dtype:
        product = torch.mm(left, right, out_dtype=total.dtype)
        if first:
            total.copy_(product)
        else:
            total += product
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


_spares: dict[torch.dtype, Tensor] = {}
"""One buffer a type, kept on the CPU from one call to the next: fresh memory costs a page fault a page there."""


def take_buffer(elements: int, states: Tensor, *, at_most: int | None = None) -> Tensor:
    """A flat buffer of `elements` or more (`at_most`, if given) in the precision of `states`, with any content."""
    dtype = precision(states)
    if states.device.type == "cpu":
        spare = _spares.pop(dtype, None)
        if spare is not None and elements <= spare.numel() and (at_most is None or spare.numel() <= at_most):
            return spare
        del spare
    return torch.empty(elements, dtype=dtype, device=states.device)


def give_buffer(buffer: Tensor) -> None:
    """Let a later call have the memory."""
    if buffer.device.type == "cpu":
        _spares[buffer.dtype] = buffer


def release_buffers() -> None:
    """Give back to the system the memory that waits for the next call."""
    _spares.clear()
