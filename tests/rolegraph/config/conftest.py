"""A folder of a user's own: an algorithm that needs no module of ours but the options, and its config."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

ALGORITHM = """
from __future__ import annotations

from rolegraph.algorithms.config import GRPOConfig
from rolegraph.interfaces import ORMRole, RolloutRole, TrainRole


class Mine:
    Config = GRPOConfig
    train: TrainRole
    rollout: RolloutRole
    orm: ORMRole | None


def plain_loss(tokens, scale: float, power: int = 2, kind: "Literal['a', 'b']" = "a"):
    raise NotImplementedError


class BadImport:
    pass
"""

MINE = """
# @package _global_
defaults:
  - override /train: megatron
  - override /rollout: vllm
  - override /orm: functions
  - override /reward: exact_match

algorithm:
  _target_: rolegraph_user_code.Mine
"""


class Folder:
    """Writes config files of a user, and names the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, text: str) -> Path:
        """Write a file below the folder."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip(), encoding="utf-8")
        return file


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Folder]:
    """The folder, whose module is forgotten afterwards."""
    from rolegraph.config.targets import signature_of

    folder = Folder(tmp_path / "conf")
    folder.write("rolegraph_user_code.py", ALGORITHM)
    folder.write("algorithm/mine.yaml", MINE)
    before = list(sys.path)
    yield folder
    sys.path[:] = before
    sys.modules.pop("rolegraph_user_code", None)
    signature_of.cache_clear()
