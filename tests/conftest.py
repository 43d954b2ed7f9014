"""Shared by all tests: a small environment for a CPU, and one Ray cluster for the modules that ask for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

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

# In the background of a script Ctrl-C is ignored, by all that is started from there too, and tests send it to runs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LOST_AFTER_5_S = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}
"""When the cluster gives up a node that is gone; one that is only slow gets 25 s."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """A Ray of our own for the whole session: 4 logical CPUs, 2 pretend GPUs, a 300 MB object store.

    A cluster of one pretend node, so that a module may add more for its own tests, and take them away again.
    """
    import ray
    from ray._private import utils
    from ray.cluster_utils import Cluster

    write, utils.write_ray_address = utils.write_ray_address, lambda *_: None  # else every Ray program here would join
    try:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4, "num_gpus": 2, "object_store_memory": 300 * 2**20, "include_dashboard": False,
                "_system_config": LOST_AFTER_5_S,
            },
        )  # fmt: skip
    finally:
        utils.write_ray_address = write
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's OpenAI-compatible server, started once, with the model `tiny` under that name: its base URL."""
    from rolegraph.models.tiny import make
    from tests.vllm_server import vllm_server

    folder = tmp_path_factory.mktemp("served")
    make(str(folder / "tiny"))
    with vllm_server(str(folder / "tiny"), folder / "log") as url:
        yield url
