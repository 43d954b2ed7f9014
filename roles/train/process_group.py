"""Torch's default process group of a role's ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from rolegraph.role import RoleContext

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join(context: RoleContext) -> None:
    """Meet the other ranks, over NCCL on GPUs and gloo on CPUs."""
    if context.master_addr in ("127.0.0.1", "localhost"):
        # gloo would look up this host's own name, which need not lead back here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if context.device == "cuda" else "gloo",
        init_method=f"tcp://{context.master_addr}:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def everyone() -> dist.ProcessGroup:
    """The group of all ranks, once they have met."""
    group = dist.group.WORLD
    assert group is not None, "join() comes first"
    return group


def leave() -> None:
    """Take the groups down, so that the process can join others."""
    if dist.is_initialized():
        dist.destroy_process_group()
