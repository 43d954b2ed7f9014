"""Where a key of the composed config came from: an override as it was typed, or a line of a config file.

Hydra keeps no record, so the composed files are walked in the order in which they were merged; the last one to set the
key is the one it came from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Override:
    """One override of the command line."""

    key: str
    typed: str


@dataclass(frozen=True)
class Source:
    """One composed config file: where its content goes in the tree, and the text."""

    package: str
    name: str
    """What to call it: a path a person can open."""
    text: str


@dataclass(frozen=True)
class Origins:
    """Everything the tree was composed from, in order."""

    overrides: Sequence[Override] = ()
    sources: Sequence[Source] = ()

    def of(self, path: Path_) -> str | None:
        """`command line: ...` or `file:line` for the last place that set the key, null when none did."""
        for override in reversed(self.overrides):
            key = split(override.key)
            if key[: len(path)] == path or (path[: len(key)] == key and key):
                return f"command line: {override.typed}"
        for source in reversed(self.sources):
            package = split(source.package)
            if path[: len(package)] == package and (line := _line(source.text, path[len(package) :])):
                return f"{source.name}:{line}"
        return None


def split(key: str) -> Path_:
    """`a.b[0].c` as a path."""
    parts = re.findall(r"[^.\[\]]+", key)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def join(path: Path_) -> str:
    """A path as `a.b[0].c`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def location(file: str | Path) -> str:
    """A file's path, relative where that is shorter."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _line(text: str, path: Path_) -> int | None:
    """The 1-based line of a key in a YAML text."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    if not path:
        return None
    mark = None
    rest = list(path)
    while rest and node is not None:
        part = rest.pop(0)
        child = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    mark, child = key.start_mark, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
            mark = child.start_mark
        if child is None:
            return None
        node = child
    return mark.line + 1 if mark is not None and not rest else None
