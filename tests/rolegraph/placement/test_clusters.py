"""Descriptions of clusters, right and wrong."""

from __future__ import annotations

import pytest

from rolegraph.errors import ConfigError
from rolegraph.placement.clusters import CORES_PER_GPU, GIB, cluster


def test_nodes_with_gpus() -> None:
    found = cluster("2x8xH100-80G")
    assert [node.name for node in found.nodes] == ["node-0", "node-1"]
    (node, _) = found.nodes
    assert (node.gpus, node.gpu_name, node.gpu_memory) == (tuple(range(8)), "H100", 80 * GIB)
    assert node.cpus == 8 * CORES_PER_GPU
    assert (found.gpus, node.memory) == (16, None)


def test_several_kinds_with_cores() -> None:
    found = cluster("1x8xH100-80G+cpu192, 2x4xA100-40GB,1xcpu32-256g")
    assert [(n.name, len(n.gpus), n.gpu_name, n.cpus) for n in found.nodes] == [
        ("node-0", 8, "H100", 192.0),
        ("node-1", 4, "A100", 4.0 * CORES_PER_GPU),
        ("node-2", 4, "A100", 4.0 * CORES_PER_GPU),
        ("node-3", 0, "", 32.0),
    ]
    assert [node.gpu_memory for node in found.nodes] == [80 * GIB, 40 * GIB, 40 * GIB, None]
    assert found.nodes[-1].memory == 256 * GIB


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("1x8xH100", "H100", None),
        ("1x8xA100-SXM4-80G", "A100-SXM4", 80 * GIB),
        ("1x1xRTX-PRO-6000-96G", "RTX-PRO-6000", 96 * GIB),
        ("1x1xL4-22.5G+cpu4", "L4", round(22.5 * GIB)),
    ],
)
def test_names_and_memory_of_gpus(text: str, name: str, memory: int | None) -> None:
    (node,) = cluster(text).nodes
    assert (node.gpu_name, node.gpu_memory) == (name, memory)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a kind of node is missing: write it as in 2x8xH100-80G"),
        ("1x8xH100-80G,", "'': a kind of node is missing"),
        ("8", "nodes without a kind"),
        ("1x16", r"write 1x16xH100-80G for nodes of 16 GPUs, or 1xcpu16 for nodes of 16 cores"),
        ("H100-80G", "begins with no number of nodes"),
        ("-1x8xH100", "begins with no number of nodes"),
        ("2xH100-80G", "the GPUs of a node are missing: write 2x8xH100-80G"),
        ("2x8x80G", "the third part names the GPU and begins with a letter"),
        ("0x8xH100-80G", "there are no nodes"),
        ("2x0xH100-80G", "a node has no GPU.*write 2xcpu32 for nodes without"),
        ("2xcpu", "a node without GPUs needs its cores: write 2xcpu32"),
        ("2xcpu0", "at least one core"),
        ("2x8xH100-80T", "memory is given in GiB, and 80T is none: write 80G"),
        ("2x8xH100-0G", "0G is none"),
        ("2xcpu8-64", "64 is none: write 80G"),
        ("2x8xH100-80G+96", "it is no kind of node"),
        ("2x8xH100-80G+cpu", "it is no kind of node"),
        ("1x1xT4-16G,2x8", r"--cluster 1x1xT4-16G,2x8: '2x8': the kind of devices is missing"),
        ("999999x8xH100", "more than 1,000,000 devices"),
    ],
)
def test_malformed_descriptions(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        cluster(text)
