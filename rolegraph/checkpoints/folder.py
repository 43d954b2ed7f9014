"""The folders of a run's checkpoints: which are whole, which is the newest, and which of them stay.

    RUN/checkpoints/step-N/   N: optimizer steps over all stages, as in metrics.jsonl
        config.yaml           the whole config of the run
        train/                what the train role saved
        driver.json           what the driver saved: step, stage, weight version, the algorithm's own state
        rows/*.arrow          rows that were made and not trained on yet
        hf/                   a Hugging Face folder, with checkpoint.export_hf
        complete.json         the marker, written last: every other file with its size, small ones with their hash

A folder without its marker is half-written or half-removed: it counts for nothing, and the next start or save removes
it. Nothing here imports torch, Ray or an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rolegraph.errors import CheckpointError
from rolegraph.results import sync_folder, write_json

FOLDER = "checkpoints"
MARKER = "complete.json"
FORMAT = 1
HASHED_BYTES = 1 << 20
"""Files up to this size are kept with their hash; larger ones with their size alone."""

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A whole one: its marker was there."""

    path: Path
    marker: Mapping[str, Any] = field(repr=False)

    @property
    def step(self) -> int:
        """Optimizer steps that were taken, over all stages."""
        return int(self.marker["step"])

    @property
    def saved_at(self) -> float:
        """Seconds since 1970."""
        return float(self.marker["saved_at"])

    @property
    def metrics(self) -> Mapping[str, float]:
        """Every metric by name, of the newest step that had it."""
        found: Mapping[str, float] = self.marker.get("metrics", {})
        return found

    def measured(self, metric: str) -> int:
        """The step whose metric it has, its own or one before it."""
        return int(self.marker.get("measured", {}).get(metric, self.step))

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(int(known["size"]) for known in self.marker["files"].values())

    @property
    def config(self) -> Path:
        """The config of the run that wrote it, as YAML."""
        return self.path / "config.yaml"

    @property
    def train(self) -> Path:
        """What `TrainRole.load` takes."""
        return self.path / "train"

    @property
    def rows(self) -> Path:
        """The folder of rows that were not trained on yet."""
        return self.path / "rows"

    @property
    def hf(self) -> Path:
        """The Hugging Face folder, where one was asked for."""
        return self.path / "hf"

    @cached_property
    def driver(self) -> Mapping[str, Any]:
        """What `driver.json` says. Raises CheckpointError where it cannot be read."""
        try:
            found: Mapping[str, Any] = json.loads((self.path / "driver.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / 'driver.json'} cannot be read: {error}") from error
        return found

    def verify(self) -> list[str]:
        """What is wrong with its files, a sentence each; empty where they are as they were written."""
        return [
            f"{name}: {fault}"
            for name, known in self.marker["files"].items()
            if (fault := _fault(self.path / name, known))
        ]


# Finding them


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return run_dir / FOLDER / f"step-{step}"


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in this folder; null where it has no marker.

    Raises CheckpointError for a marker that is there and cannot be read: that says nothing of what lies beside it.
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(marker, dict) or not {"step", "saved_at", "files"} <= marker.keys():
        raise _unreadable(path, "it says neither step nor files")
    if marker.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {marker.get('format')}, and this version of rolegraph reads format {FORMAT}: use the "
            "version that wrote it"
        )
    return Checkpoint(path, marker)


def listed(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by their steps, the newest last, without those that `unreadable` has."""
    return [each for each in _looked_at(run_dir) if isinstance(each, Checkpoint)]


def unreadable(run_dir: Path) -> list[CheckpointError]:
    """What is wrong with the markers of a run that are there and cannot be read."""
    return [each for each in _looked_at(run_dir) if isinstance(each, CheckpointError)]


def newest(run_dir: Path) -> Checkpoint | None:
    """The whole checkpoint with the most steps; null where a run has none.

    Raises CheckpointError where that may be one whose marker cannot be read.
    """
    for found in reversed(_looked_at(run_dir)):
        if isinstance(found, CheckpointError):
            raise found
        if found is not None:
            return found
    return None


def resolve(path: str | Path) -> Checkpoint:
    """The checkpoint that a path names: that folder, or the newest of a run or of a folder of checkpoints.

    Raises CheckpointError where there is none, or where the one that is named is not whole.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{path} is no folder: name a checkpoint (RUN/{FOLDER}/step-N), or the folder of a run")
    if (found := read(folder)) is not None:
        return found
    if _NAME.fullmatch(folder.name):
        raise CheckpointError(
            f"{path} is not whole: it has no marker {MARKER}, so the run ended while it was written or removed. "
            + _others(folder.parent.parent)
        )
    run_dir = folder.parent if folder.name == FOLDER else folder
    if (found := newest(run_dir)) is not None:
        return found
    raise CheckpointError(f"{path} holds no whole checkpoint: a run writes some with checkpoint.every=N")


def run_dir_of(checkpoint: Checkpoint) -> Path:
    """The folder of the run that wrote it, where it still lies there."""
    return checkpoint.path.parent.parent


def partial(run_dir: Path) -> list[Path]:
    """The folders that have no marker."""
    each = zip(_folders(run_dir), _looked_at(run_dir), strict=True)
    return [path for path, found in each if found is None]


def _looked_at(run_dir: Path) -> list[Checkpoint | CheckpointError | None]:
    """What each folder holds: a checkpoint, one whose marker cannot be read, or none."""
    return [_look_at(path) for path in _folders(run_dir)]


def _look_at(path: Path) -> Checkpoint | CheckpointError | None:
    try:
        return read(path)
    except CheckpointError as error:
        return error


def _folders(run_dir: Path) -> list[Path]:
    """By their steps."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    steps = {path: int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: steps[path])


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path / MARKER} cannot be read ({why}): mend that, or move {path} away, and the run goes on from the one "
        "before it"
    )


def _others(run_dir: Path) -> str:
    whole = [str(each.step) for each in listed(run_dir)]
    return f"Whole are those of the steps {', '.join(whole)}" if whole else "The run has no other"


# Writing and removing them


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder for the checkpoint of a step, without a marker; what had its name is removed.

    Raises OSError where the disk does not take it.
    """
    path = folder_of(run_dir, step)
    remove(path)
    (path / "train").mkdir(parents=True)
    return path


def complete(path: Path, step: int, *, metrics: Mapping[str, float], **more: Any) -> Checkpoint:
    """Write the marker of a folder whose files are all there: from now on it counts, whatever happens to the process.

    Raises OSError where the disk does not take it.
    """
    files = {str(file.relative_to(path)): _kept(file) for file in _files(path) if file.name != MARKER}
    for folder in {path, *(file.parent for file in _files(path))}:
        sync_folder(folder)
    marker = {"format": FORMAT, "step": step, "saved_at": time.time(), **more, "metrics": metrics, "files": files}
    write_json(path / MARKER, marker)
    sync_folder(path.parent)
    return Checkpoint(path, marker)


def remove(path: Path) -> None:
    """Remove a checkpoint or what there is of one, its marker first."""
    with contextlib.suppress(OSError):
        (path / MARKER).unlink(missing_ok=True)
        if path.is_dir():
            sync_folder(path)
    shutil.rmtree(path, ignore_errors=True)


def remove_partial(run_dir: Path) -> list[Path]:
    """Remove the folders that have no marker; returns them. For the one process that writes to the run's folder."""
    found = partial(run_dir)
    for path in found:
        remove(path)
    return found


def chosen(
    checkpoints: Iterable[Checkpoint],
    *,
    keep_last: int | None,
    keep_best: int = 0,
    metric: str | None = None,
    best: Literal["max", "min"] = "max",
) -> list[Checkpoint]:
    """Those that stay: the newest `keep_last` (null: all), and the `keep_best` with the best metric, by their steps.

    One without the metric is none of the best; of equal ones the newer is better. Of several that have the metric of
    one step, where not every step is measured, only the first may be the best: the weights that were measured.
    """
    by_step = sorted(checkpoints, key=lambda each: each.step)
    if keep_last is None:
        return by_step
    sign = 1.0 if best == "max" else -1.0
    name = str(metric)
    having = [each for each in by_step if metric is not None and name in each.metrics]
    first = {each.measured(name): each for each in reversed(having)}
    ranked = sorted(first.values(), key=lambda each: (sign * each.metrics[name], each.step))
    stay = {each.step for each in (*by_step[-keep_last:], *(ranked[-keep_best:] if keep_best else ()))}
    return [each for each in by_step if each.step in stay]


def prune(
    run_dir: Path,
    *,
    keep_last: int | None,
    keep_best: int = 0,
    metric: str | None = None,
    best: Literal["max", "min"] = "max",
) -> list[Checkpoint]:
    """Remove the whole checkpoints that do not stay (see `chosen`), the oldest first; returns them."""
    there = listed(run_dir)
    stay = {each.step for each in chosen(there, keep_last=keep_last, keep_best=keep_best, metric=metric, best=best)}
    gone = [each for each in there if each.step not in stay]
    for each in gone:
        remove(each.path)
    return gone


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _kept(file: Path) -> dict[str, Any]:
    """What the marker says of a file, which is on the disk from now on."""
    handle = os.open(file, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(handle)
    finally:
        os.close(handle)
    size = file.stat().st_size
    return {"size": size} | ({"sha256": _hash(file)} if size <= HASHED_BYTES else {})


def _fault(file: Path, known: Mapping[str, Any]) -> str:
    try:
        size = file.stat().st_size
        if size != known["size"]:
            return f"has {size} bytes, and had {known['size']}"
        return "has changed" if "sha256" in known and _hash(file) != known["sha256"] else ""
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
