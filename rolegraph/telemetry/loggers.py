"""Experiment trackers by name: `logger=tensorboard`, `logger=wandb`, `logger=trackio`, or a list of them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rolegraph.errors import ConfigError


class Tracker(Protocol):
    """Where metrics go beside `metrics.jsonl`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        ...

    def close(self) -> None:
        """Flush and end the run."""
        ...


class TensorBoard:
    """Event files under `<run>/tensorboard`."""

    def __init__(self, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events: Any = writer.EventFileWriter(str(run_dir / "tensorboard"))
        self._event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with every metric as a scalar."""
        values = [self._summary_pb2.Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        event = self._event_pb2.Event(step=step, wall_time=time.time())
        event.summary.CopyFrom(self._summary_pb2.Summary(value=values))
        self._events.add_event(event)

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


class HostedTracker:
    """W&B and trackio: both take `init`, `log` and `finish`."""

    def __init__(self, module: str, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        self._api = require(module, module)
        options: dict[str, Any] = {"dir": str(run_dir)} if module == "wandb" else {}
        self._api.init(project="rolegraph", name=name, config=dict(config), **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step."""
        self._api.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run on the tracker's side."""
        self._api.finish()


def _hosted(module: str) -> Callable[[Path, str, Mapping[str, Any]], Tracker]:
    return lambda run_dir, name, config: HostedTracker(module, run_dir, name, config)


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _hosted("wandb"),
    "trackio": _hosted("trackio"),
}


def require(module: str, package: str) -> Any:
    """Import a tracker's module, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"logger={package} needs the package {package}: pip install 'rolegraph[{package}]'"
        ) from error


def open_trackers(names: Sequence[str], run_dir: Path, name: str, config: Mapping[str, Any]) -> list[Tracker]:
    """Start every tracker of the config, in order."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"unknown logger {unknown[0]!r}: choose from {', '.join(TRACKERS)}")
    return [TRACKERS[tracker](run_dir, name, config) for tracker in names]
