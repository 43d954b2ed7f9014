"""rolegraph: RL post-training of language models as a graph of Ray actors.

The names to write roles and driver programs with; what they need is imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm
    from rolegraph.batch import Batch
    from rolegraph.graph import RoleGraph
    from rolegraph.interfaces import LossSpec, ORMRole, RolloutRole, SamplingParams, TrainRole
    from rolegraph.role import Role, RoleContext, endpoint

_HOME = {
    "Algorithm": "algorithms.base",
    "Batch": "batch",
    "LossSpec": "interfaces",
    "ORMRole": "interfaces",
    "Role": "role",
    "RoleContext": "role",
    "RoleGraph": "graph",
    "RolloutRole": "interfaces",
    "SamplingParams": "interfaces",
    "TrainRole": "interfaces",
    "endpoint": "role",
}

__all__ = [
    "Algorithm",
    "Batch",
    "LossSpec",
    "ORMRole",
    "Role",
    "RoleContext",
    "RoleGraph",
    "RolloutRole",
    "SamplingParams",
    "TrainRole",
    "endpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
