"""The host of a role: builds the role object, runs its endpoints, and turns exceptions into `RoleError`s.

The same host runs inside a Ray actor (`actor.py`) and in this process (`member.py`).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolegraph.errors import RoleError
from rolegraph.role import Role, RoleContext

SPIN_COUNT = "20000"
"""Rounds that an OpenMP thread waits awake: about half a millisecond."""


@dataclass(frozen=True)
class RoleSpec:
    """A role as the graph starts it: its class and config. Pickled once and sent to every rank."""

    role_class: type[Role]
    config: Any = None
    env: dict[str, str] = field(default_factory=dict)
    """Environment its processes start with."""


class Host:
    """One role object and what it is doing."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.role: Role | None = None
        self.busy: dict[int, tuple[str, float]] = {}
        """The running endpoint and since when, by thread."""

    def start(self, make: Callable[[], Role]) -> float:
        """Build the role and set it up, in the thread that will run its main lane; returns seconds."""
        started = time.perf_counter()
        with self.guard("setup"):
            self.role = make()
            self.role.setup()
        return time.perf_counter() - started

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one endpoint; the caller holds `guard(name)`."""
        if self.role is None:
            raise RuntimeError(f"the role was asked for {name}() while it is not set up")
        return getattr(type(self.role), name)(self.role, *args, **kwargs)

    def stop(self) -> None:
        """Tear the role down; once."""
        role, self.role = self.role, None
        if role is not None:
            with self.guard("teardown"):
                role.teardown()

    def guard(self, name: str) -> _Guard:
        """A context that notes what runs and turns its exception into one `RoleError` with its traceback."""
        return _Guard(self, name)

    def stack(self, frames: int = 6) -> str:
        """Where the running endpoints are: the innermost frames of each thread that runs one."""
        found, now = [], time.perf_counter()
        current = sys._current_frames()
        for ident, (name, since) in list(self.busy.items()):
            if ident in current and ident != threading.get_ident():
                found += [f"{name}() has run for {now - since:.0f} s and is at\n"]
                found += traceback.format_stack(current[ident])[-frames:]
        return "".join(found).rstrip()

    def metrics(self) -> dict[str, Any]:
        """Resident and peak memory in bytes of this process, and the running endpoints with their seconds so far."""
        now = time.perf_counter()
        return {
            "pid": os.getpid(),
            "rss": _rss(),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "busy": {name: now - since for name, since in list(self.busy.values())},
        }


class _Guard:
    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name

    def __enter__(self) -> None:
        self.host.busy[threading.get_ident()] = (self.name, time.perf_counter())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.host.busy.pop(threading.get_ident(), None)
        # A library that calls sys.exit() must not look like an actor that was told to go.
        if isinstance(error, (Exception, SystemExit)):
            context = self.host.context
            raise RoleError(
                "".join(traceback.format_exception_only(error)).strip(),
                at=time.time(),
                role=context.role,
                rank=context.rank,
                node=context.node,
                endpoint=self.name,
                remote_traceback=_own_traceback(error),
            ) from None


def _own_traceback(error: BaseException) -> str:
    """The traceback from the role's code on, without the frames that lead to it."""
    ours = {
        str(Path(__file__).with_name(name)) for name in ("host.py", "role.py", "actor.py", "member.py", "decorators.py")
    }
    here = error.__traceback__
    while here is not None and here.tb_next is not None and here.tb_frame.f_code.co_filename in ours:
        here = here.tb_next
    return "".join(traceback.format_exception(type(error), error, here))


def _rss() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def torch_env(context: RoleContext) -> dict[str, str]:
    """Environment that torch's launchers set.

    A process on GPUs sees only its own, numbered from 0, and torch and transformers take LOCAL_RANK for the number of
    the device to use: there it is 0 on every rank. `RoleContext.local_rank` tells ranks of a node apart.
    """
    return {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": "0" if context.device == "cuda" else str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(context.local_world_size),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
    }


def process_env(thread_count: int, device_ids: tuple[str, ...]) -> dict[str, str]:
    """Environment of an actor's process: its devices, its threads, and idle threads that leave the cores to others.

    GNU OpenMP, which torch uses on CPUs, puts a thread without work to sleep at once when told to be passive; waking it
    for each of the thousands of small operators of a decoding step takes a third of the step's time. It spins for a
    fraction of a millisecond first: longer than the gap between two operators, too short for another role to notice.
    """
    threads = str(thread_count)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(device_ids),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def tail(path: str | None, lines: int = 15) -> str:
    """The end of a log under a line that names it; empty where there is none."""
    if path is None or not Path(path).exists():
        return ""
    last = Path(path).read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"End of {path}:", *last]) if last else f"Its log is {path}"


def last_line(path: str | None, *, since: float) -> str:
    """The last line of a log that is not blank; none where nothing was written to it since then (`time.time()`)."""
    if path is None or not Path(path).exists() or Path(path).stat().st_mtime < since:
        return ""
    lines = [line.strip() for line in Path(path).read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def forward_sys_path(paths: list[str]) -> None:
    """Make what the driver can import importable here, after what is importable already."""
    sys.path.extend(path for path in paths if path not in sys.path)


def free_port() -> int:
    """A port that nobody listens on now, below the range from which the system hands out ports by itself."""
    for port in random.SystemRandom().sample(range(20000, 32000), 64):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 32000")


def end_children() -> None:
    """Kill every process that descends from this one."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, children before grandchildren; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold anything; the parent is the second field after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found
