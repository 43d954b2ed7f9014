"""Samples as Parquet files. With Ray a worker writes them: the driver never holds the tokens it saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.batch import Batch
from rolegraph.tasks import on_this_node
from rolegraph.transit import Payload, decode_arguments, encode_arguments

if TYPE_CHECKING:
    from ray import ObjectRef

FINISH_S = 10.0
"""Longest wait at the end of a run for files that are still being written."""


class SampleFiles:
    """Writes batches under one folder; a file that could not be written is told by `faults`, and stops nothing."""

    def __init__(self, folder: Path, *, use_ray: bool) -> None:
        self.folder = folder
        self._use_ray = use_ray
        self._writing: list[ObjectRef[Any]] = []
        self._faults: list[str] = []

    def save(self, batch: Batch, name: str) -> None:
        """Write all columns of a batch to `name`; with Ray a worker of this node does, and this returns at once."""
        path = str(self.folder / name)
        if not self._use_ray:
            try:
                _write(batch.fetch_sync(), path)
            except OSError as error:
                self._faults.append(str(error))
            return
        payload, refs = encode_arguments("save", (batch, path), {})
        self._writing.append(on_this_node(_write_task).remote(payload, *refs))

    def faults(self, wait_s: float = 0.0) -> list[str]:
        """What went wrong since the last call, after waiting for files that are being written."""
        if self._writing:
            import ray

            done, self._writing = ray.wait(self._writing, num_returns=len(self._writing), timeout=wait_s)
            self._faults += [fault for fault in ray.get(done) if fault]
        found, self._faults = self._faults, []
        return found


def _write(batch: Batch, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        batch.write_parquet(path)
    except OSError:
        Path(path).unlink(missing_ok=True)  # no reader takes a part of one
        raise


def _write_task(payload: Payload, *objects: Any) -> str | None:
    (batch, path), _ = decode_arguments(payload, objects)
    try:
        _write(batch, path)
    except OSError as error:
        return str(error)
    return None
