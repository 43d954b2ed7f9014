"""Reading the rows of a run and those of its eval sets, in Ray tasks while the roles start."""

from __future__ import annotations

import asyncio
from typing import Any

from rolegraph.algorithms.teachers import assigned
from rolegraph.batch import Batch
from rolegraph.checkpoints.fingerprint import of_data, of_models
from rolegraph.checkpoints.folder import Checkpoint
from rolegraph.checkpoints.resume import refuse_others
from rolegraph.config.eval_sets import needs_of
from rolegraph.config.schema import RunConfig
from rolegraph.data import Dataset
from rolegraph.data.report import Report
from rolegraph.errors import DataError
from rolegraph.role import is_teacher


def models_about(config: RunConfig, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What the run is about, as far as it is known; raises CheckpointError where the checkpoint has other models."""
    if config.checkpoint.every is None and checkpoint is None:
        return {}
    about = {"models": of_models(config)}
    refuse_others(checkpoint, about)
    return about


async def load_checked(
    config: RunConfig, model_path: str, about: dict[str, Any], checkpoint: Checkpoint | None
) -> tuple[Dataset, dict[str, Dataset]]:
    """Read all rows, and say in `about` which they are; CheckpointError where the checkpoint has others."""
    dataset, sets = await load_all(config, model_path)
    if about:
        about["data"] = of_data(dataset)
        refuse_others(checkpoint, about)
    return dataset, sets


async def load_all(config: RunConfig, model_path: str) -> tuple[Dataset, dict[str, Dataset]]:
    """The rows of the run and those of its eval sets by name; what fails first ends it."""
    try:
        async with asyncio.TaskGroup() as group:
            own = group.create_task(load_own(config, model_path))
            sets = {name: group.create_task(_load_set(config, name, model_path)) for name in config.eval.sets}
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None
    return own.result(), {name: task.result() for name, task in sets.items()}


async def _load_set(config: RunConfig, name: str, model_path: str) -> Dataset:
    from rolegraph.data import load

    each = config.eval.sets[name]
    needs = needs_of(config, each)
    try:
        return await asyncio.to_thread(load, each.data, model_path, needs, use_ray=config.use_ray)
    except DataError as error:
        raise DataError(f"eval.sets.{name}: {error}") from error


async def load_own(config: RunConfig, model_path: str) -> Dataset:
    """Read and tokenise the data, in a Ray task while the roles start."""
    from rolegraph.data import load

    if not getattr(config.algorithm.config, "reads_data", True):
        return Dataset(Batch.from_columns({"uid": []}), Report())
    exact: bool = getattr(config.algorithm.config, "passes_columns_on", False)
    dataset = await asyncio.to_thread(
        load, config.data, model_path, config.data_needs, use_ray=config.use_ray, keep_exact=exact
    )
    if teachers := [role for role in config.roles if is_teacher(role)]:
        assigned(dataset.rows, teachers)  # while the roles still start
    return dataset
