"""Environment variables that a config names for all roles: which it may set, and as what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TORCH = "is set for each rank as torch expects it"
_THREADS = "follows from the cores of the plan: set ROLE.cpus"
_EARLY = "is read when a process starts, before a role's variables are set: set it where Ray is started"
OURS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), _TORCH),
    "CUDA_VISIBLE_DEVICES": "follows from the plan: set it where `rolegraph run` or Ray is started",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), _THREADS),
    **dict.fromkeys(("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONHOME"), _EARLY),
    "PYTHONPATH": "is read when a process starts: give a folder with --config-dir, which every role imports from",
}
"""Variables that a config cannot set, and why."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def environment_problems(env: Mapping[Any, Any], key: str = "placement.env") -> Iterator[str]:
    """What is wrong with the variables of a config: one sentence each, with the key first."""
    for name, value in env.items():
        where = f"{key}.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield f"{where} is no name of a variable: use letters, digits and _, not a digit first"
        elif name in OURS:
            yield f"{where} {OURS[name]}; remove it"
        elif name.startswith("RAY_"):
            yield f"{where} is for Ray, which runs before the roles do: set it where Ray is started; remove it"
        elif isinstance(value, bool) or value is None:
            shown = "null" if value is None else str(value).lower()
            yield (
                f"{where}={shown} must be a string or a number: a variable has no {shown}. Type 1 or 0, or put quotes "
                f"inside quotes, as in '{where}=\"{shown}\"'"
            )
        elif not isinstance(value, str | int | float):
            yield f"{where} must be a string or a number, not {type(value).__name__}"
        elif isinstance(value, str) and "\0" in value:
            yield f"{where} holds a null character, which no variable can"


def as_environment(env: Mapping[str, Any]) -> dict[str, str]:
    """The checked variables as a process takes them."""
    return {name: str(value) for name, value in env.items()}
