"""Writing a sharded state to a folder behind a training that goes on: torch's distributed checkpoints in a thread.

Whatever can fail on one rank alone (a full disk, a folder that one node does not see) is told to all ranks before any
of them raises, so that none waits in a collective for one that has given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from rolegraph.errors import CheckpointError
from roles.train.checkpoint_folder import COMMON

_log = logging.getLogger(__name__)


class HostWriter(FileSystemWriter):
    """A rank's part of a state: planned and copied to host memory at once, written whenever `write` is called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # nothing is left to copy when it writes
        self._plan: SavePlan | None = None
        self._held: dict[Any, Any] = {}

    def stage_items(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy what the plan says this rank writes; the state may change from here on."""
        self._plan = plan
        self._held = {item.index: _copy(planner.resolve_data(item)) for item in plan.items}
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def write(self) -> list[WriteResult]:
        """Write the copies, each of which is dropped behind it."""
        assert self._plan is not None
        results: list[WriteResult] = self.write_data(self._plan, self).value() if self._plan.items else []  # type: ignore[arg-type]
        return results

    def resolve_data(self, item: WriteItem) -> Any:
        """What torch's writer asks of a planner."""
        return self._held.pop(item.index)


def _copy(value: Any) -> Any:
    if not torch.is_tensor(value):
        return value  # bytes of an object, made for this save
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class Saving:
    """One save at a time, on all ranks of the default process group."""

    def __init__(self) -> None:
        self._writer: HostWriter | None = None
        self._metadata: Metadata | None = None
        self._thread: threading.Thread | None = None
        self._results: list[WriteResult] = []
        self._fault = ""

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes; may be asked from any thread."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def begin(
        self,
        folder: Path,
        state: Mapping[str, Any],
        planner: SavePlanner,
        *,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state to host memory, and write it from a thread; `beside` writes what else this rank has to.

        Raises CheckpointError on all ranks where one of them has no such folder, or cannot make its copy.
        """
        if self._writer is not None:
            raise CheckpointError("a save is running: call finish_save() before another")
        agree("cannot save", "" if folder.is_dir() else _unseen(folder))
        started = time.perf_counter()
        group, writer = _DistWrapper(None, True, 0), HostWriter(folder)

        def plan_mine() -> SavePlan:
            planner.set_up_planner(dict(state), is_coordinator=group.is_coordinator)
            writer.set_up_storage_writer(group.is_coordinator)
            return writer.prepare_local_plan(planner.create_local_plan())

        def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        fault = ""
        try:
            plan = group.reduce_scatter("plan", plan_mine, plan_all)
            writer.stage_items(planner.finish_plan(plan), planner)
        except Exception as error:
            _log.debug("a save failed in its beginning", exc_info=True)
            fault = told(error)
        agree(f"cannot save to {folder}", fault)
        self._writer, self._results, self._fault = writer, [], ""
        self._thread = threading.Thread(target=self._write, args=(beside,), name="checkpoint", daemon=True)
        self._thread.start()
        _log.info("a checkpoint was copied in %.2f s, and is written to %s", time.perf_counter() - started, folder)

    def finish(self, complete: Callable[[], None] | None = None) -> None:
        """Wait for all ranks' writes; rank 0 then writes the metadata, and calls `complete`.

        Raises CheckpointError on all ranks where one of them could not write.
        """
        writer, thread = self._writer, self._thread
        if writer is None or thread is None:
            return
        thread.join()
        self._writer = self._thread = None
        results, self._results = self._results, []
        what = f"the checkpoint in {writer.checkpoint_id} is not complete"
        agree(what, self._fault)
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(results, everyone, dst=0)
        fault = ""
        if everyone is not None:
            try:
                assert self._metadata is not None
                writer.finish(self._metadata, everyone)
                if complete is not None:
                    complete()
            except Exception as error:
                fault = told(error)
        agree(what, fault)

    def _write(self, beside: Callable[[], None] | None) -> None:
        writer = self._writer
        assert writer is not None
        try:
            self._results = writer.write()
            if beside is not None:
                beside()
        except Exception as error:
            _log.debug("a write failed", exc_info=True)
            self._fault = told(error)


class Saver:
    """What backends' checkpoints have in common: a save that writes beside training, and what all ranks agree on."""

    def __init__(self) -> None:
        self._saving = Saving()

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes; may be asked from any thread."""
        return self._saving.is_writing

    def _beside(self, common: Mapping[str, Any], folder: Path) -> Callable[[], None] | None:
        """How rank 0 writes what all agree on; null on the others."""
        if dist.get_rank() != 0:
            return None
        return partial(torch.save, {"rolegraph": common}, folder / COMMON)


def agree(what: str, fault: str) -> None:
    """CheckpointError on every rank, naming those with a fault, if any rank has one; called by all of them."""
    faults = [fault]
    if dist.get_world_size() > 1:
        faults = [""] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
    by_text = {text: rank for rank, text in reversed(list(enumerate(faults))) if text}
    if by_text:
        raise CheckpointError(f"{what}: " + "; ".join(f"rank {rank}: {text}" for text, rank in by_text.items()))


def _unseen(folder: Path) -> str:
    return f"there is no folder {folder} here; output_dir has to be storage that all nodes share"


def told(error: BaseException) -> str:
    """One line: what failed, without what torch makes of it: its zip writer hides a full disk behind a wrong offset."""
    if isinstance(error, CheckpointException):
        parts = dict.fromkeys(told(each[0]) for each in error.failures.values())
        return "; ".join(parts)
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    for each in reversed(chain):
        if isinstance(each, OSError):
            return f"{each.strerror or each}" + (f" ({each.filename})" if each.filename else "")
    return f"{type(chain[-1]).__name__}: {chain[-1]}"
