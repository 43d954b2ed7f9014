"""The commands that the page of the device-groups example shows: all give the same figures."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "examples" / "device_groups" / "README.md"
COMMANDS = re.findall(r"^    python (examples/device_groups/.*)$", PAGE.read_text(), flags=re.MULTILINE)
LOCAL = next(command for command in COMMANDS if "--local" in command)


def figures(command: str, folder: Path) -> list[float]:
    """The score of each round that a command prints."""
    script, *words = shlex.split(command)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return [float(line.partition(": ")[2]) for line in done.stdout.splitlines() if line.startswith("round ")]


def test_the_sampler_learns(tmp_path: Path) -> None:
    first, *_, last = figures(LOCAL, tmp_path)
    assert first < 0.3
    assert last > 0.8
    assert not list(tmp_path.iterdir()), "nothing is written without actors"


@pytest.mark.ray
@pytest.mark.parametrize("command", [command for command in COMMANDS if command != LOCAL])
def test_on_groups_of_actors_it_gives_the_same(command: str, tmp_path: Path) -> None:
    assert figures(command, tmp_path) == figures(LOCAL, tmp_path)
    (run,) = (tmp_path / "outputs" / "best_of_n").iterdir()
    assert {file.name for file in (run / "logs").iterdir()} >= {"sampler-0.log", "scorer-0.log"}


def test_the_page_shows_three_ways() -> None:
    assert len(COMMANDS) == 3
