"""What the roles of a config ask for, and what this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.placement.types import Inventory, Node, RoleRequest


def requests(roles: Mapping[str, Any]) -> list[RoleRequest]:
    """What each role's config asks for; `roles` maps a name to a `Spec`, or to anything with its `config`.

    A config with a field `replicas` is that of an engine, another that of SPMD ranks. A class attribute
    `never_on_gpu = True` says that the role needs no device and only moments of a core; `binds = ROLE` that the actors
    of another role do its work, and nothing is placed for it.
    """
    return [_request(role, spec.config) for role, spec in roles.items() if not getattr(spec.config, "binds", None)]


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
    """The GPUs, cores and memory of this machine, found without Ray or torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = _listed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus)
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"]))
    sizes = [memory for _, memory in gpus]
    node = Node(
        name="this machine",
        gpus=tuple(range(count)),
        cpus=float(cores),
        gpu_name=gpus[0][0] if count else "",
        gpu_memory=min(size for size in sizes if size) if count and all(sizes) else None,
        memory=_memory(),
    )
    return Inventory((node,))


def _listed_gpus() -> list[tuple[str, int | None]]:
    """Name and bytes of each GPU that the driver lists."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if listed.returncode:
        return []
    found: list[tuple[str, int | None]] = []
    for line in listed.stdout.splitlines():
        name, _, mib = line.rpartition(",")
        found.append((name.strip(), int(mib) * 2**20 if mib.strip().isdigit() else None))
    return found


def _memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or less in a container."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(most, int(text)) if text.isdigit() else most
