"""The tiny model's folder and a way to write a JSONL file, for the tests of data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rolegraph.models import tiny

# A busy machine is no fault of the code.
settings.register_profile("data", deadline=None)
settings.load_profile("data")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make(str(folder))
    return str(folder)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (objects, or lines as bytes) to a file; returns its path."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines))
        return str(path)

    return write
