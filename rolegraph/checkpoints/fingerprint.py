"""What a run is about, in a few bytes: its models by their content, its rows by their names and lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.batch import Batch

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig, Spec

SAMPLES = 16
"""Places of a large file that are looked at."""
SAMPLE_BYTES = 1 << 16
WEIGHTS = (".safetensors", ".bin", ".gguf")
DESCRIBED_BY = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
_LENGTHS = ("prompt_length", "response_length", "teacher_prompt_length")
_CHUNK = 1 << 16


def of_model(folder: str | Path) -> dict[str, str]:
    """The folder, and a hash of its config, its tokenizer, and its weights' sizes and some of their bytes."""
    path = Path(folder)
    found = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if file.name in DESCRIBED_BY or file.suffix in WEIGHTS:
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
            found.update(b"".join(_some_of(file)))
    return {"path": str(folder), "sha256": found.hexdigest()}


def about_run(config: RunConfig, rows: Batch) -> dict[str, Any]:
    """The fingerprints of a run whose models have been found: `models` by role, and `data`."""
    return {"models": of_models(config.roles), "data": of_rows(rows)}


def of_models(roles: Mapping[str, Spec]) -> dict[str, dict[str, str]]:
    """Of the policy (`model`), and of the role's own model where a role has one."""
    named = {role: path for role, spec in roles.items() if isinstance(path := getattr(spec.config, "model", None), str)}
    policy = named.pop("train", None)
    own = {f"{role}.model": path for role, path in named.items() if path != policy}
    return {name: of_model(path) for name, path in {"model": policy, **own}.items() if path is not None}


def of_rows(rows: Batch) -> dict[str, Any]:
    """How many there are, and a hash of their names and lengths in tokens, in their order."""
    found = hashlib.sha256()
    uids = rows["uid"]
    for start in range(0, len(rows), _CHUNK):
        found.update("".join(f"{uid}\n" for uid in uids.slice(start, _CHUNK).to_pylist()).encode())
    for name in _LENGTHS:
        if name in rows:
            found.update(name.encode() + rows.numpy(name).astype("<f8").tobytes())
    return {"rows": len(rows), "sha256": found.hexdigest()}


def _some_of(file: Path) -> Iterable[bytes]:
    """A small file, or some places of a large one, the first and the last among them."""
    size = file.stat().st_size
    with file.open("rb") as source:
        if size <= SAMPLES * SAMPLE_BYTES:
            yield source.read()
            return
        for place in range(SAMPLES):
            source.seek((size - SAMPLE_BYTES) * place // (SAMPLES - 1))
            yield source.read(SAMPLE_BYTES)
