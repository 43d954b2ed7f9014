"""What a run is about, in a few bytes: its models by their content, its rows by the hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.checkpoints.settings import takes_part

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.data import Dataset

SAMPLES = 16
"""Places of a large file that are looked at."""
SAMPLE_BYTES = 1 << 16
WEIGHTS = (".safetensors", ".bin", ".gguf")
DESCRIBED_BY = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")


def of_model(folder: str | Path) -> dict[str, str]:
    """The folder, and a hash of its config, its tokenizer, and its weights' sizes and some of their bytes."""
    path = Path(folder)
    found = hashlib.sha256(b"" if path.is_dir() else str(folder).encode())  # a name that another machine knows
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if file.name in DESCRIBED_BY or file.suffix in WEIGHTS:
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
            found.update(b"".join(_some_of(file)))
    return {"path": str(folder), "sha256": found.hexdigest()}


def of_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Of a run whose models have been found: of the policy (`model`), and of each role's own model.

    Roles that only evaluate are left out.
    """
    draws = bool(getattr(config.algorithm.config, "draws_samples", True))
    roles = {role: spec for role, spec in config.roles.items() if takes_part(role, draws=draws)}
    named = {role: path for role, spec in roles.items() if isinstance(path := getattr(spec.config, "model", None), str)}
    policy = named.pop("train", None)
    own = {f"{role}.model": path for role, path in named.items() if path != policy}
    return {name: of_model(path) for name, path in {"model": policy, **own}.items() if path is not None}


def of_data(dataset: Dataset) -> dict[str, Any]:
    """How many rows there are, and a hash of all their columns, in their order."""
    return {"rows": len(dataset), "sha256": dataset.report.content}


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
