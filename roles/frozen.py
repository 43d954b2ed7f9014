"""A model of transformers that computes forward alone: onto the role's devices, in its type, and off them by turns."""

from __future__ import annotations

import threading
from typing import Any

from rolegraph.role import RoleContext

ONE_LOADS = threading.Lock()
"""Held while transformers loads a model: two that load in threads of one process leave each other without weights."""


class FrozenModel:
    """One replica's model, for inference alone."""

    def __init__(self, kind: Any, folder: str, dtype: str, context: RoleContext, *, spread: bool = False) -> None:
        """Load it by a class of transformers.

        `dtype` auto is bfloat16 on a GPU and float32 on a CPU. With `spread` the layers go over all of the replica's
        GPUs, where it has several.
        """
        import torch

        torch.set_num_threads(context.threads)
        self._on_gpu = context.device == "cuda"
        self.dtype = {"auto": "bfloat16" if self._on_gpu else "float32"}.get(dtype, dtype)
        placed = {"device_map": "auto"} if spread and self._on_gpu and len(context.device_ids) > 1 else {}
        with ONE_LOADS:
            self.model, info = kind.from_pretrained(
                folder, dtype=getattr(torch, self.dtype), output_loading_info=True, **placed
            )
        self.missing: list[str] = sorted(info["missing_keys"])
        """Weights that the checkpoint lacks, which are random ones now."""
        self.model.requires_grad_(False).eval()
        self.home = torch.device("cuda", 0) if self._on_gpu else torch.device("cpu")
        if not placed:
            self.model.to(self.home)
        self._dropped: list[tuple[Any, Any]] = []
        """Weights without their memory, and their shapes."""

    def move(self, away: bool) -> None:
        """To host memory, or back to the device; without a GPU it stays where it is.

        Weights that were dropped get memory again, and no content.
        """
        import torch

        if not away:
            for weight, shape in self._dropped:
                weight.data = weight.data.new_empty(shape)
            self._dropped = []
        if self._on_gpu:
            self.model.to("cpu" if away else self.home)
            torch.cuda.empty_cache()

    def drop(self) -> None:
        """Give up the weights' memory; buffers, which no trainer sends, stay."""
        import torch

        if not self._dropped:
            self._dropped = [(weight, weight.shape) for weight in self.model.parameters()]
            for weight, _ in self._dropped:
                weight.data = weight.data.new_empty(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()
