"""Seconds until each role of a run is ready, as the run itself reports them: roles that share cores, and roles apart.

Role seconds count from the moment the graph starts (placement, processes, imports, models, engines); `in all` counts
from the run's first line and includes Ray's own start and the data.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.measure import run, show

ROLES = ("train", "rollout", "orm")
LAYOUTS = {"colocated": "placement=colocate", "separate": "placement=separate"}
SMALL = (
    "data.size=64",
    "algorithm.global_batch_size=8",
    "algorithm.num_generations=4",
    "algorithm.max_completion_length=8",
    "logger.samples_every=0",
    "max_steps=1",
)
_READY = re.compile(r"roles ready after ([\d.]+) s \(([^)]*)\)")


def ready(output: str) -> dict[str, float]:
    """The seconds of each role, and `in all`, from what a run prints."""
    found = _READY.search(" ".join(output.split()))
    if found is None:
        raise RuntimeError(f"the run did not say when its roles were ready:\n{output[-2000:]}")
    seconds = dict(part.strip().rsplit(" ", 2)[:2] for part in found[2].split(","))
    return {role: float(value) for role, value in seconds.items()} | {"in all": float(found[1])}


def startup(layout: str, folder: Path) -> dict[str, float]:
    """Run one step; when its roles were ready, and the seconds of the whole command."""
    command = [sys.executable, "-m", "rolegraph.cli", "run", "algorithm=grpo", "model=tiny", LAYOUTS[layout], *SMALL]
    finished = run([*command, f"output_dir={folder / layout}"])
    return ready(finished.output) | {"command": finished.seconds}


def main() -> None:
    """Print a row a layout."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            found = startup(layout, Path(folder))
            rows.append((layout, *(found[key] for key in (*ROLES, "in all", "command"))))
    show("start-up seconds by role (grpo, tiny)", ("", *ROLES, "roles and data", "the command, one step"), rows)


if __name__ == "__main__":
    main()
