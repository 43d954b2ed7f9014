"""What this machine has, and what configs ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rolegraph.placement import requests, this_machine
from rolegraph.placement.clusters import GIB


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `nvidia-smi` that prints what the file `listed` holds."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/listed\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "listed"


def test_gpus_with_their_memory(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.write_text("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n")
    (node,) = this_machine().nodes
    assert (node.gpus, node.gpu_name, node.gpu_memory) == ((0, 1), "NVIDIA H100 80GB HBM3", 81559 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().gpus == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (node,) = this_machine().nodes
    assert (node.gpus, node.gpu_name, node.gpu_memory) == ((), "", None)


def test_gpus_that_do_not_tell_their_memory(driver: Path) -> None:
    driver.write_text("NVIDIA GB10, [N/A]\n")
    (node,) = this_machine().nodes
    assert (node.gpus, node.gpu_memory) == ((0,), None)


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (node,) = this_machine().nodes
    assert node.gpus == ()
    assert node.cpus >= 1
    assert node.memory is None or node.memory > GIB


@dataclass
class Engine:
    replicas: int | None = None
    tensor_parallel_size: int = 2
    data_parallel_size: int = 3


@dataclass
class Spec:
    config: object


def test_devices_of_an_engine_that_is_data_parallel_inside() -> None:
    (request,) = requests({"sampler": Spec(Engine())})
    assert (request.tensor, request.data, request.model_parallel) == (2, 3, 6)
