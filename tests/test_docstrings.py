"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_with_examples() -> list[str]:
    """Modules of the package that have examples, those that are marked as never run aside."""
    files = [file for folder in ("rolegraph", "roles") for file in sorted((ROOT / folder).rglob("*.py"))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if has_example(file)]


def has_example(file: Path) -> bool:
    """Whether an example that is not marked as skipped begins in a file."""
    return any(line.lstrip().startswith(">>> ") and "+SKIP" not in line for line in file.read_text().splitlines())


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted
    assert not done.failed
