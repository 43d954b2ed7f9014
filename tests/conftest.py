"""Shared by all tests: a small environment for a CPU, and one Ray cluster for the modules that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch, Ray or vLLM is imported anywhere: workers inherit these.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of our own for the whole session: 4 logical CPUs, 2 pretend GPUs, a 300 MB object store."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        object_store_memory=300 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
