"""What mypy makes of programs as a user writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def errors_of(folder: Path, right: str, wrong: str) -> list[str]:
    """The errors that mypy finds in `right` followed by `wrong`; fails when it finds any in `right` alone."""
    files = folder / "right.py", folder / "wrong.py"
    files[0].write_text(right)
    files[1].write_text(right + wrong)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, *map(str, files)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert all(line.partition(":")[0].endswith("wrong.py") for line in found), found
    return found
