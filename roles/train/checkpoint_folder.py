"""What is wrong with a folder that a train role saved, in words: files that are missing or cut, another model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

COMMON = "common.pt"
"""What all ranks agree on."""
INCIDENTAL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")
"""Settings of a Hugging Face config that do not tell one model from another."""


def broken(folder: Path, *files: str) -> str:
    """Why the folder is no whole checkpoint with `.metadata` and these files; empty where it is one."""
    for name in (".metadata", *files):
        if not (folder / name).is_file():
            return f"it is not whole: {name} is missing"
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever pickle makes of it
        return f"it is not whole: .metadata cannot be read ({type(error).__name__}: {error})"
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            have = "is missing" if size is None else f"has {size} bytes"
            return f"it is not whole: {name} {have}, of {end}"
    return ""


def common_of(path: Path) -> tuple[dict[str, Any], str]:
    """What all ranks agreed on, from its file; or why that cannot be read, which no rank may keep from the others."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True).get("rolegraph", {})
    except Exception as error:  # whatever pickle makes of it
        return {}, f"it is not whole: {path.name} cannot be read ({type(error).__name__}: {error})"
    return found, ""


def differences(folder: Path, wanted: Iterable[tuple[str, tuple[int, ...], bool]]) -> str:
    """Which tensors the folder does not have, or has in another shape; empty where it has all.

    Each is wanted by its key and shape, and may be one whose shape does not matter (padding differs).
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = []
    for key, shape, any_shape in wanted:
        there = saved.get(key)
        if not isinstance(there, TensorStorageMetadata):
            found.append(f"{key} is not in it")
        elif not any_shape and tuple(there.size) != shape:
            found.append(f"{key} is {list(there.size)} in it, and {list(shape)} here")
    return _first(found)


def told_apart(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> str:
    """Which values differ, by their key; empty where none does."""
    found = []
    for key in sorted(there.keys() | here.keys()):
        old, new = there.get(key), here.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [text] if (text := told_apart(old, new, f"{prefix}{key}.")) else []
        elif old != new:
            found.append(f"{prefix}{key} is {old} in it, and {new} here")
    return _first(found)


def _first(found: list[str], most: int = 4) -> str:
    more = f", and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more
