"""Clusters by description: hardware that a plan is made for, and that need not be there.

A description is one or several kinds of nodes, joined by commas::

    KIND   = NODES "x" GPUS "x" NAME ["-" MEMORY] ["+cpu" CORES]        nodes with GPUs
           | NODES "xcpu" CORES ["-" MEMORY]                            nodes without
    MEMORY = a number of GiB, as in 80G; of one GPU, or of a node without GPUs

    2x8xH100-80G                    2 nodes of 8 GPUs named H100, each with 80 GiB
    1x8xH100-80G+cpu192             the same, one node, with 192 cores
    1x8xH100-80G,2x4xA100-40G       two kinds of nodes
    2xcpu32-256G                    2 nodes without GPUs, with 32 cores and 256 GiB each

Without a memory the plan shows what each device needs and does not compare; without cores a node has `CORES_PER_GPU`
for each GPU.
"""

from __future__ import annotations

import re

from rolegraph.errors import ConfigError
from rolegraph.placement.types import Inventory, Node

CORES_PER_GPU = 12
"""Of a node whose cores are not given: what a cloud gives with a GPU at the least (8 A100: 96)."""
MOST_DEVICES = 1_000_000
GIB = 2**30
EXAMPLES = (
    "as in 2x8xH100-80G (2 nodes of 8 GPUs with 80 GiB each), 2xcpu32 (2 nodes of 32 cores), or several by commas"
)

_MEMORY = r"(?:-(?P<memory>\d+(?:\.\d+)?)(?P<unit>[A-Za-z]*))?"
_CPU = re.compile(rf"(?P<nodes>\d+)xcpu(?P<cores>\d*){_MEMORY}", re.IGNORECASE)
_GPU = re.compile(
    rf"(?P<nodes>\d+)x(?P<gpus>\d+)x(?P<name>[A-Za-z](?:[\w.]|-(?!\d+(?:\.\d+)?[A-Za-z]*(?:\+|$)))*){_MEMORY}"
    r"(?:\+cpu(?P<cores>\d+))?",
    re.IGNORECASE,
)


def cluster(text: str) -> Inventory:
    """The nodes of a description; ConfigError says what is wrong with it and shows one that is right."""
    nodes: list[Node] = []
    for part in text.split(","):
        nodes += _nodes(part.strip(), text, len(nodes))
    return Inventory(tuple(nodes))


def _nodes(part: str, text: str, first: int) -> list[Node]:
    def fault(what: str) -> ConfigError:
        where = f"--cluster {text}" if part == text else f"--cluster {text}: {part!r}"
        return ConfigError(f"{where}: {what}")

    if not part:
        raise fault(f"a kind of node is missing: write it {EXAMPLES}")
    on_cpu, on_gpu = _CPU.fullmatch(part), _GPU.fullmatch(part)
    found = on_cpu or on_gpu
    if found is None:
        raise fault(_what_is_wrong(part))
    count, cores = int(found["nodes"]), found["cores"]
    gpus = 0 if on_cpu else int(found["gpus"])
    memory = _bytes(found["memory"], found["unit"])
    if memory is None:
        raise fault(f"memory is given in GiB, and {found['memory']}{found['unit']} is none: write 80G")
    if count < 1:
        raise fault("there are no nodes: the first number is how many there are")
    if on_gpu and gpus < 1:
        raise fault(f"a node has no GPU: the second number is its GPUs; write {count}xcpu32 for nodes without")
    if on_cpu and not cores:
        raise fault(f"a node without GPUs needs its cores: write {count}xcpu32")
    if cores and int(cores) < 1:
        raise fault("a node has at least one core")
    if count * max(gpus, 1) > MOST_DEVICES:
        raise fault(f"more than {MOST_DEVICES:,} devices are no cluster to plan for")
    name = found["name"] if on_gpu else ""
    return [
        Node(
            name=f"node-{first + index}",
            gpus=tuple(range(gpus)),
            cpus=float(cores or gpus * CORES_PER_GPU),
            gpu_name=name,
            gpu_memory=memory or None if on_gpu else None,
            memory=memory or None if on_cpu else None,
        )
        for index in range(count)
    ]


def _bytes(number: str | None, unit: str | None) -> int | None:
    """0 where none is given, null where it is none."""
    if number is None:
        return 0
    if (unit or "").upper() not in ("G", "GB", "GIB") or float(number) <= 0:
        return None
    return round(float(number) * GIB)


def _what_is_wrong(part: str) -> str:
    if re.fullmatch(r"\d+", part):
        return f"these are nodes without a kind: write them {EXAMPLES}"
    if re.fullmatch(r"\d+x\d+", part):
        nodes, devices = part.split("x")
        return (
            f"the kind of devices is missing: write {part}xH100-80G for nodes of {devices} GPUs, or "
            f"{nodes}xcpu{devices} for nodes of {devices} cores without"
        )
    if not re.match(r"\d+x", part):
        return f"it begins with no number of nodes: write it {EXAMPLES}"
    if re.match(r"\d+x\d+x\d", part):
        return "the third part names the GPU and begins with a letter, as in 2x8xH100-80G"
    if re.match(r"\d+x(?!cpu)[A-Za-z]", part, re.IGNORECASE):
        nodes, _, rest = part.partition("x")
        return f"the GPUs of a node are missing: write {nodes}x8x{rest}"
    return f"it is no kind of node: write it {EXAMPLES}"
