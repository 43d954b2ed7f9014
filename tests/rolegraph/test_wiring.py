"""What follows from a plan for the roles of a run."""

from __future__ import annotations

import pytest

from rolegraph.placement import PlacementConfig, RoleRequest, plan
from rolegraph.placement.clusters import cluster
from rolegraph.wiring import backend_of

SHARED = PlacementConfig(colocate_groups=(("train", "rollout"),))


@pytest.mark.parametrize(
    ("nodes", "placement", "train", "rollout", "expected"),
    [
        ("1x1xH100", SHARED, {"gpus": 1}, {}, "ipc"),
        ("1x2xH100", SHARED, {"gpus": 2}, {}, "gloo"),
        ("1x2xH100", SHARED, {"gpus": 2}, {"tensor": 2}, "gloo"),
        # GPU 0 of one node is not GPU 0 of the other.
        ("2x1xH100", SHARED, {"gpus": 2}, {}, "gloo"),
        ("1x2xH100", PlacementConfig(), {"gpus": 1}, {"gpus": 1}, "nccl"),
        # The machine has GPUs, and one of the two is not on them.
        ("1x2xH100", PlacementConfig(), {"gpus": 0}, {"gpus": 1}, "gloo"),
        ("1x2xH100", PlacementConfig(), {"gpus": 1}, {"gpus": 0}, "gloo"),
        ("1xcpu8", SHARED, {}, {}, "gloo"),
    ],
)
def test_weights_go_the_way_that_their_devices_allow(
    nodes: str, placement: PlacementConfig, train: dict[str, int], rollout: dict[str, int], expected: str
) -> None:
    requests = [RoleRequest("train", **train), RoleRequest("rollout", is_spmd=False, **rollout)]
    assert backend_of(plan(cluster(nodes), requests, placement)) == expected
