"""Ranks of a train role in processes of their own, and what they leave for the test that started them."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

DEADLINE_S = 240


class Spread(Protocol):
    """A case that takes several ranks."""

    @property
    def name(self) -> str:
        """What its files are called."""

    @property
    def world(self) -> int:
        """Its ranks."""


def run_together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run each job in a fresh process, side by side; fails where one of them does not end."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=job) for job in jobs]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=DEADLINE_S)
        assert not any(process.is_alive() for process in processes), "a rank hangs"
    finally:
        for process in processes:
            process.kill()


def in_rounds(
    run_case: Callable[[Any, Path, int, int], dict[str, Any]],
    slot: int,
    rounds: Sequence[Sequence[tuple[Any, int]]],
    ports: Sequence[Sequence[int]],
    folder: Path,
) -> None:
    """One process: in each round it is a rank of the case whose slots it lies in, and leaves what that rank saw."""
    for cases, round_ports in zip(rounds, ports, strict=True):
        for (case, first), port in zip(cases, round_ports, strict=True):
            if not first <= slot < first + case.world:
                continue
            leave(folder / f"{case.name}-{slot - first}.pkl", partial(run_case, case, folder, slot - first, port))


def leave(path: Path, run: Callable[[], dict[str, Any]]) -> None:
    """Keep what a rank saw, its seconds, and its error where it had one."""
    started = time.monotonic()
    try:
        seen = run()
    except Exception:
        seen = {"error": traceback.format_exc()}
    path.write_bytes(pickle.dumps(seen | {"seconds": time.monotonic() - started}))


def seen_by_ranks(folder: Path, case: Spread) -> list[dict[str, Any]]:
    """What every rank of a case left."""
    return [pickle.loads((folder / f"{case.name}-{rank}.pkl").read_bytes()) for rank in range(case.world)]
