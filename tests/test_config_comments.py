"""Keys that the comments of the config files name are there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.config.load import composed, filled

ROOT = Path(__file__).parents[1]


def has_key(tree: Any, key: str) -> bool:
    """Whether a composed config has the key; what a node takes freely (null or empty now) counts."""
    first, _, rest = key.partition(".")
    return not tree or (isinstance(tree, Mapping) and first in tree and (not rest or has_key(tree[first], rest)))


def test_keys_that_comments_of_the_configs_name_exist() -> None:
    roles = {"sampling": ("sampler", "prm", "orm"), "gkd": ("train", "rollout", "teacher")}
    trees: dict[str, list[dict[str, Any]]] = {}
    for algorithm, groups in roles.items():
        for group in groups:
            for option in (path.stem for path in (ROOT / "conf" / group).glob("*.yaml")):
                tree = filled(composed([f"algorithm={algorithm}", f"{group}={option}"]).tree)
                for node in (group, "model", "data", "placement", "algorithm"):
                    trees.setdefault(node, []).append({node: tree[node]})
    unknown, count = [], 0
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        for comment in re.findall(r"#(.*(?:\n *#.*)*)", path.read_text()):
            for key in re.findall(rf"\b(?:{'|'.join(trees)})(?:\.[a-z]\w+)+", comment):
                count += 1
                if not any(has_key(tree, key) for tree in trees[key.partition(".")[0]]):
                    unknown.append((path.name, key))
    assert count > 5
    assert unknown == []
