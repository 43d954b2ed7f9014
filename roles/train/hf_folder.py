"""The policy as a Hugging Face folder: what any train backend's weights become on disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rolegraph.interfaces import TensorInfo
from roles.train.saving import agree, told

_log = logging.getLogger(__name__)
_SHARD_BYTES = 4 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class Export(Protocol):
    """All weights of a policy under Hugging Face names."""

    @property
    def manifest(self) -> list[TensorInfo]:
        """Every tensor of `tensors()`, in order."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each weight, whole; every rank has to walk it to the end.

        A tensor may be a view of a live weight: use it before asking for the next.
        """


def write_folder(export: Export, folder: str, *, source: str, hf_config: Any, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder from all ranks together; rank 0 writes, config.json comes last.

    `source` is the folder whose tokenizer and other files come along, `hf_config` the configuration of transformers.
    Raises CheckpointError on all ranks where rank 0 cannot write.
    """

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _copy_side_files(source, folder)
        _write_shards(export.manifest, tensors, folder)
        hf_config.dtype = str(dtype).removeprefix("torch.")
        hf_config.save_pretrained(folder)

    on_first_rank(write, export.tensors(), folder)


def save_weights(tensors: dict[str, Tensor], path: str) -> None:
    """A file of safetensors with the rights that other new files have here: the library's own lets nobody else read."""
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    Path(path).chmod(0o666 & ~mask)


def on_first_rank(
    write: Callable[[Iterator[tuple[str, Tensor]]], None], tensors: Iterator[tuple[str, Tensor]], folder: str
) -> None:
    """Let rank 0 write what all ranks gather; CheckpointError on all of them where it cannot."""
    fault = ""
    try:
        if dist.get_rank() == 0:
            write(tensors)
    except Exception as error:
        _log.debug("%s was not written", folder, exc_info=True)
        fault = told(error)
    for _ in tensors:  # the others gather along, and so does rank 0 after a fault, or they would wait for it
        pass
    agree(f"{folder} was not written", fault)


def _copy_side_files(source: str, folder: str) -> None:
    """Tokenizer, chat template, generation settings: every file beside the weights and the config."""
    for entry in os.scandir(source):
        if entry.is_file() and entry.name != "config.json" and not entry.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy(entry.path, os.path.join(folder, entry.name))


def _write_shards(manifest: list[TensorInfo], tensors: Iterator[tuple[str, Tensor]], folder: str) -> None:
    sizes = {info.name: _bytes(info) for info in manifest}
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > _SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    held: dict[str, Tensor] = {}
    pending = iter(zip(files, shards, strict=True))
    file, wanted = next(pending)
    for name, tensor in tensors:
        # Views of live or reused memory: safetensors wants tensors of their own.
        held[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        if len(held) == len(wanted):
            save_weights(held, os.path.join(folder, file))
            held = {}
            file, wanted = next(pending, ("", []))
    if len(files) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def _bytes(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    dtype: torch.dtype = getattr(torch, info.dtype)
    return count * dtype.itemsize
