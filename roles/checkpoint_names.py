"""The weights of a model of transformers under the names that its checkpoint has for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class UnnamedWeightError(Exception):
    """A weight that is no plain part of what the checkpoint holds; the message names it."""


def checkpoint_views(model: Any) -> dict[str, Tensor]:
    """The model's own memory, as the checkpoint cuts it up; writing there changes the model.

    Most weights are called alike in both. transformers keeps those of experts in one tensor a layer, where checkpoints
    have one an expert. Tied weights are there under each of their names. Raises UnnamedWeightError for a model whose
    loading computes with the weights.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.dim() < 2:
            views = dict.fromkeys(revert_weight_conversion(model, {name: tensor.to("meta")}), tensor)
        else:
            views = _rows_of(name, tensor, _reverted(model, name, tensor))
        if twice := found.keys() & views.keys():
            raise UnnamedWeightError(f"the checkpoint's {min(twice)} is made of several weights of the model")
        found |= views
    return found


def need_not_come(model: Any, views: dict[str, Tensor]) -> set[str]:
    """Names that a trainer may leave out: those of memory that an earlier name has too (tied weights), and buffers."""
    buffers = {buffer.data_ptr() for buffer in model.buffers() if buffer.numel()}
    seen: set[tuple[Any, ...]] = set()
    found = set()
    for name, tensor in views.items():
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and (place in seen or tensor.data_ptr() in buffers):
            found.add(name)
        seen.add(place)
    return found


def _reverted(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The numbers of the rows that are in each tensor of the checkpoint; rows are what the last dimension has."""
    from transformers.core_model_loading import revert_weight_conversion

    rows = tensor.shape[:-1].numel()
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(
            model, {name: torch.arange(rows).reshape(*tensor.shape[:-1], 1)}
        )
    except Exception as error:  # transposing, for one, finds another shape than it knows
        raise UnnamedWeightError(f"{name} is not as the checkpoint has it: {type(error).__name__}: {error}") from error
    return reverted


def _rows_of(name: str, tensor: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    if len(parts) == 1 and next(iter(parts.values())).shape[:-1] == tensor.shape[:-1]:
        return dict.fromkeys(parts, tensor)
    flat = tensor.reshape(-1, tensor.shape[-1])
    views = {}
    for part, numbers in parts.items():
        first, count = int(numbers.reshape(-1)[0]), numbers.numel()
        in_a_row = torch.equal(numbers.reshape(-1), torch.arange(first, first + count)) and tensor.is_contiguous()
        if not in_a_row or numbers.dim() > 2:  # more dimensions than a matrix has: they were swapped
            raise UnnamedWeightError(f"{name} is not as the checkpoint has it: {part} is scattered over it")
        views[part] = flat[first : first + count]
    return views
