"""`--device_groups JSON` on a command line: Hydra's grammar has no quoted keys, so the option is taken out before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolegraph.errors import ConfigError

OPTION = "--device_groups"
_WIDTH = 100
"""Characters of a faulty line that an error shows."""


def take_option(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--device_groups JSON` or `--device_groups=JSON`, and its text."""
    rest: list[str] = []
    found: str | None = None
    waiting = iter(words)
    for word in waiting:
        name, equals, text = word.partition("=")
        if name.replace("-", "_") != OPTION.replace("-", "_"):
            rest.append(word)
            continue
        if found is not None:
            raise ConfigError(f"{OPTION} is given twice: give all groups in one")
        found = text if equals else next(waiting, None)
        if found is None:
            raise ConfigError(f"{OPTION} needs its groups as JSON: {OPTION} '{EXAMPLE}'")
    return rest, found


EXAMPLE = '{"sample_group": {"device": "GPU", "ranks": [0, 1], "workers": ["sampler"]}}'


def parse_option(text: str) -> dict[str, Any]:
    """The groups as the option states them; ConfigError shows where it is no JSON, or what it is instead."""
    try:
        found = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{OPTION} is no JSON: {error.msg}\n{_pointed(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{OPTION} {text} is no JSON object: write {EXAMPLE}")
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{OPTION} has the key {key!r} twice in one object: the first would be lost")
        found[key] = value
    return found


def _pointed(error: json.JSONDecodeError) -> str:
    """The faulty line with a mark under the place."""
    line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
    at = error.colno - 1
    start = max(0, min(at - _WIDTH // 2, len(line) - _WIDTH))
    shown = line[start : start + _WIDTH]
    return f"  {shown}\n  {' ' * (at - start)}^"
