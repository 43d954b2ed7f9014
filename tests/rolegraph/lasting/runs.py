"""Runs of the roles in `lasting_roles`, each in a process of its own that can be killed.

The processes are forked from one that has imported everything, so that a run that is killed ten times takes seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from rolegraph.telemetry import read_metrics
from rolegraph.telemetry.metrics import is_timing

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMMON = (
    *("--config-dir", str(HERE), "train=lasting", "reward=null", "placement=separate", "data=jsonl", "use_ray=false"),
    *("deterministic=true", "algorithm.global_batch_size=4", "algorithm.max_completion_length=6"),
    "algorithm.warm_start={max_steps: 5, lr: 0.5}",
    *("train.lr_schedule=linear", "logger.samples_every=4", "checkpoint.every=3"),
)
GRPO = (
    *("algorithm=grpo", "rollout=lasting", "orm=lasting", "algorithm.num_generations=2", "algorithm.beta=0.1"),
    *("algorithm.steps_per_generation=2", "algorithm.num_iterations=2", "algorithm.dynamic_sample=true"),
    *COMMON,
)
"""Four steps a generation, so that checkpoints are taken in its middle; a warm start, a reference, a falling rate."""
GKD = (
    *("algorithm=gkd", "rollout=lasting", "teacher=lasting", "algorithm.lmbda=0.5", "algorithm.gkd_logits_topk=2"),
    *COMMON,
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["rolegraph.cli", "rolegraph.run", "rolegraph.config.load", "rolegraph.algorithms.grpo", "rolegraph.algorithms.gkd"]
)


def rows(path: Path, count: int = 14) -> Path:
    """Rows with prompts and responses; an epoch ends within a generation."""
    lines = [json.dumps({"prompt": f"{n} and {n % 3}", "response": f"{n + n % 3}"}) for n in range(count)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def begin(folder: Path, *words: str, file_bytes: int | None = None) -> ForkServerProcess:
    """A run in `folder`, none of whose files may be larger; what it says goes to a file beside that."""
    process = _context.Process(target=_run, args=(str(said_by(folder)), [*words, f"output_dir={folder}"], file_bytes))
    process.start()
    return process


def finish(folder: Path, *words: str, timeout_s: float = 60.0, file_bytes: int | None = None) -> tuple[int, str]:
    """The exit code of a run that is left alone, and what it said."""
    before = said_by(folder).stat().st_size if said_by(folder).exists() else 0
    process = begin(folder, *words, file_bytes=file_bytes)
    process.join(timeout_s)
    assert process.exitcode is not None, said_by(folder).read_text()[-3000:]
    return process.exitcode, said_by(folder).read_bytes()[before:].decode()


def said_by(folder: Path) -> Path:
    return folder.with_suffix(".out")


def figures(folder: Path) -> list[dict[str, Any]]:
    """The metrics without those that measure the machine."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not is_timing(key)} for row in rows]


def wait_for(what: Callable[[], bool], process: ForkServerProcess, seconds: float = 30.0) -> None:
    """Wait until something is so, or the process has ended."""
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until and process.exitcode is None:
        time.sleep(0.002)


def steps_of(folder: Path) -> int:
    """Lines in the log."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:  # a run that begins anew gives the old one another name
        return 0


def _run(output: str, words: list[str], file_bytes: int | None) -> None:
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(ROOT)
    from rolegraph.cli import dispatch

    sys.exit(dispatch(["run", *words]))
