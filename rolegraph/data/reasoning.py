"""Tasks of reasoning-gym as rows: generated questions with their answers, for its own verifiers to score."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator
from typing import Any

from rolegraph.data.config import DataConfig
from rolegraph.data.rows import Row
from rolegraph.errors import DataError


def rows_of_task(config: DataConfig) -> Iterator[tuple[str, Row]]:
    """Rows with `messages`, `answer`, `task`, `entry` (the task's own entry as JSON, what its verifier scores by),

    `task_config` (JSON of the settings the task was made with) and, where the task gives an answer, `response`.
    """
    settings: dict[str, Any] = {"seed": config.seed, "size": config.size, **config.task_config}
    dataset = _create(str(config.task), settings)
    settings_text = json.dumps(settings, sort_keys=True, default=_plain)
    for index in range(len(dataset)):
        entry = dataset[index]
        answer = entry.get("answer")
        row: Row = {
            "messages": [{"role": "user", "content": config.question_format.replace("{question}", entry["question"])}],
            "answer": None if answer is None else str(answer),
            "task": config.task,
            "entry": json.dumps(entry, default=_plain),
            "task_config": settings_text,
        }
        if answer is not None:
            row["response"] = config.answer_format.replace("{answer}", str(answer))
        yield f"{config.task}:{index}", row


def _create(task: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"data.source=reasoning_gym needs a package: pip install reasoning-gym ({error})") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise DataError(f"data.task={task!r} is no task of reasoning-gym; near it: {', '.join(near) or 'none'}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise DataError(f"data.task_config.{key} is no setting of {task}: {hint}")
    try:
        return reasoning_gym.create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.task_config does not suit {task}: {error} (it was {settings})") from error


def _plain(value: Any) -> Any:
    """JSON for what reasoning-gym keeps in its entries: sets, dataclasses, numbers of numpy; else text."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
