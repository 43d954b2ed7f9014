"""A vLLM sampler in a process of its own, as its actor would be."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from rolegraph.role import RoleContext
from roles.sampler.config import VLLMSamplerConfig


class _Process(BaseManager):
    pass


def _role(config: VLLMSamplerConfig, context: RoleContext) -> Any:
    from roles.sampler.vllm import VLLMSampler

    return VLLMSampler(config, context)


_Process.register("role", _role)


@contextmanager
def engine_process(**settings: Any) -> Iterator[Any]:
    """A running sampler; `settings` are those of its config."""
    settings = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "kv_cache_bytes": 64 * 2**20} | settings
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    process.start()
    try:
        role: Any = process.role(VLLMSamplerConfig(**settings), RoleContext(role="sampler", threads=2))
        role.setup()
        yield role
        role.teardown()
    finally:
        process.shutdown()
