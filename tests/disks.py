"""A disk that gets full."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """While the block runs, no file of this process gets more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def small_disk(path: Path, free: int) -> Iterator[bool]:
    """While the block runs, `path` takes so many bytes; where nothing can be mounted, each file of this process does.

    Gives whether it is a disk of its own.
    """
    path.mkdir(parents=True)
    size = f"size={max(free, 4096)}"
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], capture_output=True, check=False
    ).returncode
    try:
        with nullcontext() if mounted else small_files(free):
            yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
