"""An outcome role with an engine, in a process of its own as its actor would be."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from rolegraph.role import RoleContext


class _Process(BaseManager):
    pass


def _role(target: str, config: Any, context: RoleContext) -> Any:
    from rolegraph.wiring import import_target

    return import_target(target)(config, context)


_Process.register("role", _role)


@contextmanager
def role_process(target: str, config: Any, role: str = "orm") -> Iterator[Any]:
    """A running role, of the class that `target` names."""
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    process.start()
    try:
        made: Any = process.role(target, config, RoleContext(role=role, threads=2))  # type: ignore[attr-defined]
        made.setup()
        yield made
        made.teardown()
    finally:
        process.shutdown()
