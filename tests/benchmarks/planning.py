"""Seconds to plan large clusters: three roles on 64, 512 and 4,096 GPUs, and what of it is filling in the ranks.

The plain way beside it fills a dictionary with (role, rank) -> (node, device) in one loop: no rules, no mesh, no cores.
Run it as `python -m tests.benchmarks planning`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rolegraph.placement import Inventory, PlacementConfig, Plan, RoleRequest, plan
from rolegraph.placement.clusters import cluster
from rolegraph.reservation import bundles_of
from tests.benchmarks.measure import median, show

SIZES = (64, 512, 4096)
RUNS = 5
GOAL_S = 2.0


def layout(gpus: int) -> list[RoleRequest]:
    """Half of the GPUs train with TP 4 and PP 2, a quarter generates with TP 2, a quarter teaches with TP 4."""
    return [
        RoleRequest("train", gpus=gpus // 2, tensor=4, pipeline=2),
        RoleRequest("rollout", gpus=gpus // 4, tensor=2, is_spmd=False),
        RoleRequest("teacher", gpus=gpus // 4, tensor=4, is_spmd=False),
        RoleRequest("orm", gpus=0, is_spmd=False, light=True),
    ]


def seconds(call: Callable[[], object]) -> float:
    """The median of a few runs."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def plain(inventory: Inventory, asked: list[RoleRequest]) -> dict[tuple[str, int], tuple[str, int]]:
    """Devices one after the other, handed to the roles one after the other."""
    free = iter([(node.name, gpu) for node in inventory.nodes for gpu in node.gpus])
    return {(request.role, index): next(free) for request in asked for index in range(request.gpus or 0)}


def planned(gpus: int) -> tuple[Inventory, Plan]:
    """One plan from the description of the cluster to the bundles of every group."""
    inventory = cluster(f"{gpus // 8}x8xH100-80G")
    found = plan(inventory, layout(gpus), PlacementConfig())
    bundles_of(found)
    return inventory, found


def main() -> None:
    """Print the table."""
    rows = []
    for gpus in SIZES:
        inventory = cluster(f"{gpus // 8}x8xH100-80G")
        asked = layout(gpus)
        by_loop = seconds(lambda i=inventory, a=asked: plain(i, a))
        only_plan = seconds(lambda i=inventory, a=asked: plan(i, a, PlacementConfig()))
        whole = seconds(lambda n=gpus: planned(n))
        rows.append(
            (
                f"{gpus:,}",
                f"{by_loop:.4f}",
                f"{only_plan:.3f}",
                f"{whole:.3f}",
                f"{gpus / whole:,.0f}",
                f"< {GOAL_S:g}" if gpus == SIZES[-1] else "-",
            )
        )
    header = ("GPUs", "plain loop, s", "plan, s", "with cluster and bundles, s", "GPUs/s", "goal, s")
    show("Planning: train TP 4 PP 2, rollout TP 2, teacher TP 4, orm", header, rows)


if __name__ == "__main__":
    main()
