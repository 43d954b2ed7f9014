"""What the roles of a config ask for, and what this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from rolegraph.placement.types import Inventory, Node, RoleRequest


def requests(roles: Mapping[str, Any]) -> list[RoleRequest]:
    """What each role's config asks for; `roles` maps a name to a `Spec`, or to anything with its `config`.

    A config with a field `replicas` is that of an engine, another that of SPMD ranks. A class attribute
    `never_on_gpu = True` says that the role needs no device and only moments of a core.
    """
    return [_request(role, spec.config) for role, spec in roles.items()]


def _request(role: str, config: Any) -> RoleRequest:
    def size(*names: str) -> int:
        return next((int(getattr(config, name)) for name in names if hasattr(config, name)), 1)

    light = bool(getattr(config, "never_on_gpu", False))
    is_spmd = not hasattr(config, "replicas")
    return RoleRequest(
        role=role,
        count=getattr(config, "ranks", None) or getattr(config, "replicas", None),
        gpus=0 if light else getattr(config, "gpus", None),
        cpus=getattr(config, "cpus", None),
        is_spmd=is_spmd,
        light=light,
        tensor=size("tensor_model_parallel_size", "tensor_parallel_size"),
        context=size("context_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        data=1 if is_spmd else size("data_parallel_size"),
    )


def this_machine() -> Inventory:
    """The GPUs and cores of this machine, found without Ray or torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = 0
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"]))
    return Inventory((Node("this machine", tuple(range(count)), float(cores)),))
