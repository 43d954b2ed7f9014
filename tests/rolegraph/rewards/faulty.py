"""Reward functions that go wrong in every way, one bad row among good ones: a plugin for the tests of the pool."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolegraph.rewards import reward

_libc = ctypes.PyDLL(None)
"""Calls through it keep the interpreter lock: no Python thread of the process runs meanwhile."""


def _hang_in_c() -> None:
    _libc.sleep(600)


def _fault(kind: str) -> Any:
    """Misbehave as `kind` says; what comes back is given as the row's reward."""
    faults: dict[str, Callable[[], Any]] = {
        "hang": lambda: time.sleep(600),
        "hang_in_c": _hang_in_c,
        "segfault": lambda: ctypes.string_at(0),
        "exit": lambda: os._exit(3),
        "abort": os.abort,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sys_exit": lambda: sys.exit(1),
        "raise": lambda: 1 / 0,
        "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "infinite": lambda: float("inf"),
        "huge": lambda: 10**400,
        "text": lambda: "1.0",
        "list": lambda: [1.0],
    }
    return faults[kind]() if kind in faults else float(kind)


@reward("faulty")
def faulty(completions: list[str], *, scale: float = 1.0) -> list[Any]:
    return [value * scale if isinstance(value := _fault(text), float) else value for text in completions]


@reward
def short(completions: list[str]) -> list[float]:
    """One value too few, for one row too: none."""
    return [1.0] * (len(completions) - 1)


@reward
def endless(completions: list[str]) -> Any:
    while True:
        yield 1.0


@reward
def not_a_list(completions: list[str]) -> Any:
    return 1.0


@reward
def chatty(completions: list[str]) -> list[float]:
    """Prints more than any pipe holds."""
    print("x" * 5_000_000)
    return [1.0 for _ in completions]


@reward
async def slow_async(completions: list[str], *, seconds: float = 0.5) -> list[float]:
    """All rows wait at the same time."""

    async def one(text: str) -> float:
        await asyncio.sleep(seconds)
        return float(text)

    return await asyncio.gather(*map(one, completions))


@reward
async def hanging_async(completions: list[str]) -> list[float]:
    await asyncio.sleep(600 if "hang" in completions else 0)
    return [1.0 for _ in completions]


@reward
def lengths(completions: list[str], *, response_ids: list[list[int]], bonus: list[float] | None = None) -> list[float]:
    """Wants the ids, and a column where there is one."""
    return [len(ids) + (bonus[row] if bonus else 0.0) for row, ids in enumerate(response_ids)]


@reward
def column_names(completions: list[str], **columns: list[Any]) -> list[float]:
    return [float(len(columns)) for _ in completions]


@reward
def with_child(completions: list[str], *, pid_file: list[str]) -> list[float]:
    """Starts a process of its own, writes down its and our ids, and hangs where Python cannot be interrupted."""
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file[0]).write_text(f"{os.getpid()} {child.pid}")
    _hang_in_c()
    return [1.0]


@reward
def worker_id(completions: list[str]) -> list[float]:
    return [float(os.getpid()) for _ in completions]


class Counting:
    """A reward with state and a setting."""

    def __init__(self, start: float = 0.0) -> None:
        self.count = start

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[float]:
        self.count += 1
        return [self.count for _ in completions]
