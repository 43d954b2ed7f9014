"""A train role of one rank, in the process of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.role import RoleContext
from roles.train.config import HuggingFaceTrainConfig, MegatronTrainConfig
from tests.models import make_checkpoint
from tests.roles.train.megatron_workers import free_port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints `start` takes by name."""
    path = tmp_path_factory.mktemp("megatron")
    make_checkpoint(path / "qwen3", "qwen3", tied=True)
    make_checkpoint(path / "qwen3_moe", "qwen3_moe")
    return path


def classes(backend: str) -> tuple[Any, Any]:
    """A train role and its config."""
    if backend == "megatron":
        from roles.train.megatron import MegatronTrain

        return MegatronTrain, MegatronTrainConfig
    from roles.train.huggingface import HuggingFaceTrain

    return HuggingFaceTrain, HuggingFaceTrainConfig


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Any]]:
    """Start a role on this process, `backend` huggingface or Megatron's; one at a time."""
    running: list[Any] = []

    def make(kind: str = "qwen3", *, backend: str = "megatron", deterministic: bool = False, **settings: Any) -> Any:
        stop()
        context = RoleContext(role="train", threads=1, master_port=free_port(), deterministic=deterministic)
        role_class, config = classes(backend)
        role = role_class(config(model=str(folder / kind), **{"lr": 1e-2} | settings), context)
        running.append(role)
        role.setup()
        return role

    def stop() -> None:
        while running:
            running.pop().teardown()

    yield make
    stop()
    torch.use_deterministic_algorithms(False)
