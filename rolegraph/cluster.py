"""Ray itself: join a cluster that runs, or start one on this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

_ENV = {
    # Which GPUs a process sees is set from the plan; Ray would hide them all from actors that reserve none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Cluster:
    """A connection to Ray; `stop` ends it, and Ray with it when `connect` started that."""

    def __init__(self, *, is_ours: bool, is_joined: bool = False) -> None:
        self.is_ours = is_ours
        self.is_joined = is_joined
        """Whether the cluster was there before, and may be more than this machine."""

    @classmethod
    def connect(cls, cpus: float, *, object_store_bytes: int | None = None) -> Cluster:
        """Use the Ray this process is connected to, else join one, else start one with `cpus` logical CPUs.

        Joined are the cluster of RAY_ADDRESS, and one that `ray start` left running on this machine.
        """
        import ray

        if ray.is_initialized():
            return cls(is_ours=False, is_joined=True)
        for name, value in _ENV.items():
            os.environ.setdefault(name, value)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if finds_cluster():
            try:
                ray.init(**quiet)
                # Leaving a joined cluster ends our connection, not the cluster.
                return cls(is_ours=True, is_joined=True)
            except ConnectionError:
                if os.environ.get("RAY_ADDRESS"):
                    raise
        # One more than the plan needs: tasks that read data must not wait for roles to end.
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)) + 1,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            **quiet,
        )
        return cls(is_ours=True)

    def stop(self) -> None:
        """Disconnect, unless the program was connected before; a Ray that we started ends, a joined one stays."""
        import ray

        if self.is_ours and ray.is_initialized():
            ray.shutdown()


def finds_cluster() -> bool:
    """Whether there is a Ray to join, or was one lately: asked without a connection."""
    return bool(os.environ.get("RAY_ADDRESS")) or Path("/tmp/ray/ray_current_cluster").exists()
