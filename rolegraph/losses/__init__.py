"""Losses and advantages: pure functions of tensors and arrays, free of configs and of Ray.

`resolve` turns a loss as the config names it into one to call. Nothing here imports torch before it is called, so that
an algorithm can be composed and planned without it.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rolegraph.interfaces import LossSpec
    from rolegraph.losses.types import Loss

__all__ = ["resolve"]


def resolve(spec: LossSpec) -> Loss:
    """The loss a config names: an instance of a class, or a function with its keyword arguments bound.

    A function's attributes (`needs_entropy`, `prepare`) stay readable on what comes back. Raises ImportError or
    TypeError, naming the target, for one that is not there or takes other arguments.
    """
    module_name, _, name = spec.target.rpartition(".")
    try:
        target = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"loss {spec.target!r} cannot be imported: {error}") from error
    try:
        if inspect.isclass(target):
            return cast("Loss", target(**spec.kwargs))
        inspect.signature(target).bind(None, **spec.kwargs)
    except TypeError as error:
        raise TypeError(f"loss {spec.target}: {error}") from error
    loss = partial(target, **spec.kwargs)
    loss.__dict__.update(vars(target))
    return cast("Loss", loss)
