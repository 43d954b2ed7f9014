"""The README's command that is given again when its run was killed, with Megatron and vLLM."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rolegraph.telemetry import read_metrics
from tests.runs import MARK, SMALL, logs, marked, rolegraph, run
from tests.test_documentation import ROOT, going_on


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """As shown, but for the sizes; with Megatron and vLLM, and killed in the middle of a generation."""
    shown = [word for word in shlex.split(going_on())[2:] if not word.startswith("output_dir=")]
    small = ("deterministic=true", "rollout.dtype=float32", "max_steps=8", "algorithm.num_iterations=2")
    words = (*shown, *SMALL, *small, "algorithm.warm_start.max_steps=5")
    whole, folder = run(*words, folder=tmp_path / "whole"), tmp_path / "killed"
    killed = killed_behind(folder, 12, *words)
    assert len(killed) == 12
    again = run(*words, folder=folder)
    assert f"going on behind step 5, from {folder}" in again.output or "going on behind step 10" in again.output
    assert again.held_bytes == 0, "rows were read back by a worker"
    assert again.figures == whole.figures
    assert len(again.figures) == 13
    done = rolegraph("checkpoints", str(folder), "--verify", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "verified: 2 with all files as they were written" in done.stdout


def killed_behind(folder: Path, step: int, *words: str) -> list[dict[str, Any]]:
    """The log of a run that is killed once a step is in it."""
    command = [sys.executable, "-m", "rolegraph.cli", "run", *words, f"output_dir={folder}"]
    mark = {**os.environ, "PYTHONPATH": str(ROOT), MARK: folder.name}
    log = folder / "metrics.jsonl"
    with (folder.parent / "killed.out").open("w") as output:
        process = subprocess.Popen(command, env=mark, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    while not log.exists() or len(log.read_bytes().splitlines()) < step:
        assert process.poll() is None, (folder.parent / "killed.out").read_text()[-3000:] + logs(folder)
        time.sleep(0.02)
    process.kill()
    process.wait()
    until = time.monotonic() + 60  # Ray looks after its own once in a while
    while (left := marked(folder.name)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, f"still running after their driver was killed: {left}"
    return read_metrics(log)
