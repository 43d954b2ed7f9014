"""Data: rows from files, hubs and generated tasks become prompts in the model's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolegraph.data.config import DataConfig

if TYPE_CHECKING:
    from rolegraph.data.dataset import Batches, Dataset
    from rolegraph.data.loading import Pending, load, submit

__all__ = ["Batches", "DataConfig", "Dataset", "Pending", "load", "submit"]

_HOME = {"Batches": "dataset", "Dataset": "dataset", "Pending": "loading", "load": "loading", "submit": "loading"}


def __getattr__(name: str) -> Any:
    # Validating a config imports this package; reading rows is for a run.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
