"""The launch script for several machines, with stand-ins for the commands it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "multi_node" / "launch.sh"


def test_the_head_waits_for_its_machines_and_runs_the_driver(tmp_path: Path) -> None:
    commands = {
        "ray": 'echo "ray $1"',
        # The first question finds no cluster yet, later ones one machine more each.
        "python": 'n=$(cat "$0.n" 2>/dev/null || echo 0); echo $((n + 1)) > "$0.n"; [ "$n" = 0 ] && exit 1; echo "$n"',
        "rolegraph": 'echo "rolegraph $* at $RAY_ADDRESS"',
        "hostname": "echo 10.0.0.1",
        "sleep": ":",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HEAD": "10.0.0.1", "NODES": "2"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "algorithm=grpo"], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == [
        "ray start",
        "0 of 2 machines are there",
        "1 of 2 machines are there",
        "rolegraph run algorithm=grpo at 10.0.0.1:6379",
        "ray stop",
    ]
