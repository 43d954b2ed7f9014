"""Loading a data set: in this process, or in a Ray task while the roles start."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.batch import Batch
from rolegraph.data.build import build
from rolegraph.data.config import DataConfig
from rolegraph.data.dataset import Dataset
from rolegraph.data.rows import Needs
from rolegraph.errors import DataError
from rolegraph.tasks import on_this_node, received, sent

if TYPE_CHECKING:
    from ray import ObjectRefGenerator

log = logging.getLogger(__name__)


def load(
    config: DataConfig,
    model_path: str,
    needs: Needs = "prompt",
    *,
    use_ray: bool = False,
    keep_exact: bool = False,
) -> Dataset:
    """The rows of a source: tokenised, for prompts (RL), responses (sft) or text (pt), or as text (chat).

    With `use_ray` the work is done in a Ray task on this node and its heavy columns stay in the object store.
    `keep_exact` is that of `build`.

    Raises:
        DataError: the source cannot be read, a row is bad and `on_bad_row` is fail, or no row is left.
    """
    if use_ray:
        return submit(config, model_path, needs, keep_exact=keep_exact).result()
    shards, report = build(config, model_path, needs, keep_exact=keep_exact)
    return _dataset(Batch.concat(shards), report, config)


def submit(config: DataConfig, model_path: str, needs: Needs = "prompt", *, keep_exact: bool = False) -> Pending:
    """Start loading in a Ray task on this node, whose files it reads; `result` waits for it."""
    # What takes a process down (memory, as a rule) does so again, and Ray would try for ever.
    task = on_this_node(_build_task, num_returns="streaming", max_retries=0)
    config = _absolute(config)
    return Pending(task.remote(config, model_path, needs, keep_exact), config)


class Pending:
    """A data set that is being loaded by a Ray task."""

    def __init__(self, stream: ObjectRefGenerator, config: DataConfig) -> None:
        self._stream = stream
        self._config = config

    def result(self) -> Dataset:
        """Wait for the data set; errors are those of `load`, and DataError where the task's process was killed."""
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        try:
            report = ray.get(next(self._stream))
            rows = received(self._stream)
        except RayTaskError as error:
            if isinstance(error.cause, DataError):
                raise error.cause from None
            raise
        except (OutOfMemoryError, WorkerCrashedError, NodeDiedError) as error:
            raise DataError(_killed(self._config, error)) from error
        return _dataset(rows, report, self._config)


def _killed(config: DataConfig, error: Exception) -> str:
    """What became of the process that loaded, and how to load less."""
    from ray.exceptions import OutOfMemoryError

    origin = f"data.source={config.source}" + (f" data.path={config.path}" if config.path else "")
    how = (
        "was killed because memory ran out" if isinstance(error, OutOfMemoryError) else "died, as when memory runs out"
    )
    less = {
        "reasoning_gym": f"set data.size below {config.size}",
        "huggingface": "set data.split='train[:10000]' or data.limit=10000",
    }.get(str(config.source), "set data.limit=10000, or data.path to fewer files")
    return (
        f"the process that loads {origin} {how}: {less}, or leave more memory free (fewer rollout.replicas, a smaller "
        f"rollout.kv_cache_bytes)\n{str(error).strip().splitlines()[0]}"
    )


def _build_task(config: DataConfig, model_path: str, needs: Needs, keep_exact: bool) -> Iterator[Any]:
    """The report, then the shards."""
    shards, report = build(config, model_path, needs, keep_exact=keep_exact)
    yield report
    yield from sent(shards)


def _dataset(rows: Batch, report: Any, config: DataConfig) -> Dataset:
    for line in report.lines():
        log.info(line)
    return Dataset(rows, report, shuffle=config.shuffle)


def _absolute(config: DataConfig) -> DataConfig:
    """Paths as this process means them: a task has a working directory of its own."""

    def absolute(name: str) -> str:
        path = Path(name).expanduser()
        local = path.exists() or config.source in ("jsonl", "parquet")
        return str(path.absolute()) if local else name

    changes: dict[str, Any] = {}
    if isinstance(config.path, str):
        changes["path"] = absolute(config.path)
    elif config.path:
        changes["path"] = tuple(absolute(name) for name in config.path)
    if config.chat_template and "{" not in config.chat_template:
        changes["chat_template"] = str(Path(config.chat_template).expanduser().absolute())
    return dataclasses.replace(config, **changes)
