"""A vLLM teacher in a process of its own, as its actor would be."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from rolegraph.role import RoleContext
from roles.teacher.config import VLLMTeacherConfig


class _Process(BaseManager):
    pass


def _role(config: VLLMTeacherConfig, context: RoleContext) -> Any:
    from roles.teacher.vllm import VLLMTeacher

    class Counting(VLLMTeacher):
        def requests(self) -> int:
            """How many sequences the engine was given."""
            return self._engine._count

    return Counting(config, context)


_Process.register("role", _role)


@contextmanager
def engine_process(**settings: Any) -> Iterator[Any]:
    """A running teacher; `settings` are those of its config."""
    settings = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 16, "kv_cache_bytes": 64 * 2**20} | settings
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    process.start()
    try:
        role: Any = process.role(VLLMTeacherConfig(**settings), RoleContext(role="teacher", threads=2))
        role.setup()
        yield role
        role.teardown()
    finally:
        process.shutdown()
