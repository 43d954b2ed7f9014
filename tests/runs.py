"""Running `rolegraph run` as a user does, and reading what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rolegraph.telemetry import read_metrics
from rolegraph.telemetry.metrics import is_timing

DRIVER = """
import sys
from rolegraph.batch import bytes_held
from rolegraph.cli import dispatch
code = dispatch(sys.argv[1:])
print(f"driver held {bytes_held()} bytes of heavy columns", "torch" in sys.modules)
sys.exit(code)
"""
"""The `rolegraph` command, and then what its process was made to hold."""

SMALL = (
    "data.size=200",
    "algorithm.global_batch_size=32",
    "algorithm.num_generations=4",
    "algorithm.max_completion_length=8",
    "rollout.max_num_seqs=32",
)
"""A GRPO run of a few seconds after its start."""


GONE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Finished:
    """A run that came to its end."""

    folder: Path
    output: str
    metrics: list[dict[str, Any]]

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The metrics without those that measure the machine."""
        return [{key: value for key, value in row.items() if not is_timing(key)} for row in self.metrics]

    @property
    def held_bytes(self) -> int:
        """Bytes of token columns that the driver deserialised."""
        found = re.search(r"driver held (\d+) bytes", self.output)
        assert found is not None, self.output
        return int(found[1])


MARK = "ROLEGRAPH_TEST_RUN"
"""Set for a command and inherited by all it starts, so that what stays behind is found."""


def rolegraph(*words: str, cwd: Path, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; fails when any process of it outlives it."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), MARK: mark}
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", DRIVER, *words]
    done = subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"still running after the command has ended: {left}"
    return done


def marked_pids(mark: str) -> dict[int, str]:
    """The processes of a command by pid, as what they call themselves."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())[:200]
    return found


def marked(mark: str) -> list[str]:
    """The processes of a command, as what they call themselves."""
    return list(marked_pids(mark).values())


def run(*overrides: str, folder: Path, timeout_s: float = 280.0) -> Finished:
    """`rolegraph run` into `folder`; fails with the output when the run does."""
    done = rolegraph("run", *overrides, f"output_dir={folder}", cwd=Path(__file__).parents[1], timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-5000:] + logs(folder)
    return Finished(folder, done.stdout, read_metrics(folder / "metrics.jsonl"))


def logs(folder: Path) -> str:
    """The ends of the actors' logs, for the message of a failing test."""
    return "".join(f"\n--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("logs/*.log")))
