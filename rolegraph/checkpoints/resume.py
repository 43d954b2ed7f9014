"""Whether a run goes on from a checkpoint, from which one, whether it may, and how it does."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.algorithms.hooks import Step
from rolegraph.checkpoints import folder
from rolegraph.checkpoints.folder import Checkpoint
from rolegraph.checkpoints.settings import differences, shown
from rolegraph.checkpoints.state import State, read_rows
from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.interfaces import TrainRole

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm
    from rolegraph.config.schema import RunConfig


def begin(config: RunConfig, run_dir: Path) -> str | None:
    """Look at the run's folder before anything starts; a sentence where nothing is left to do.

    Raises:
        ConfigError: the folder holds a run and `resume` says nothing of it; or there is nothing to go on from; or the
            run would have other settings than the one it goes on with.
        CheckpointError: the checkpoint is not as it was written.
    """
    draws = bool(getattr(config.algorithm.config, "draws_samples", True))
    checkpoint = start_of(config, run_dir)
    if checkpoint is None:
        _refuse_another(config, run_dir, draws=draws)
        return None
    if faults := checkpoint.verify():
        lines = "".join(f"\n  {fault}" for fault in faults[:5])
        raise CheckpointError(
            f"{checkpoint.path} is not as it was written:{lines}\nRemove it, and the run goes on from the one before it"
        )
    before = settings_of(checkpoint)
    if changed := list(differences(before, config.tree, draws=draws)):
        raise ConfigError(
            f"resume={shown(config.resume)}: the run of {checkpoint.path} has other settings, and would not be the "
            "same run:\n" + "\n".join(f"  {line}" for line in changed) + "\nGive it the same, or begin in a new "
            "output_dir with resume=false"
        )
    return finished(checkpoint, config.max_steps)


def _refuse_another(config: RunConfig, run_dir: Path, *, draws: bool) -> None:
    """Raise ConfigError where the folder has metrics of a run with other settings, which is not begun anew."""
    before = kept_settings(run_dir) if holds_metrics(run_dir) else None
    if before is not None and (changed := list(differences(before, config.tree, draws=draws))):
        raise ConfigError(
            f"resume={shown(config.resume)}: output_dir={run_dir} holds a run without checkpoints that has other "
            "settings:\n" + "\n".join(f"  {line}" for line in changed) + "\nChoose another folder, or remove that one"
        )


def start_of(config: RunConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint that the run begins from; null where it begins anew. Raises as `begin` does.

    A run that began from another's checkpoint, and has none of its own yet, begins from that one once more.
    """
    newest, holds_run = folder.newest(run_dir), holds_metrics(run_dir)
    origin = _origin(run_dir) if config.resume and newest is None else None
    if config.resume is True:
        if newest is None:
            where = "anew" if origin is None else f"from {origin} once more"
            raise ConfigError(
                f"resume=true: output_dir={run_dir} holds no whole checkpoint to go on from. resume=auto begins "
                f"{where} where there is none"
            )
        return newest
    if config.resume == "auto":
        return newest if origin is None else _once_more(origin, run_dir)
    if not config.resume:
        if newest is not None or holds_run:
            go_on = " (or go on with resume=true)" if newest is not None else ""
            raise ConfigError(
                f"output_dir={run_dir} holds a run already: choose another folder, or remove that one{go_on}"
            )
        return None
    if origin is not None and holds_run and _names(config.resume, origin):
        return _once_more(origin, run_dir)
    chosen = folder.resolve(config.resume)
    is_here = newest is not None and newest.path.resolve() == chosen.path.resolve()
    if (newest is not None or holds_run) and not is_here:
        or_else = "go on with that run by resume=true" if newest is not None else "remove that one"
        raise ConfigError(
            f"resume={config.resume} begins from step {chosen.step}, and output_dir={run_dir} holds a run already: "
            f"choose another folder, or {or_else}"
        )
    return chosen


def holds_metrics(run_dir: Path) -> bool:
    """Whether a run has taken steps in this folder: one that was killed before has left nothing to keep."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def _origin(run_dir: Path) -> str | None:
    """The checkpoint that a run in this folder began from, by its config; null where it began anew."""
    said = (kept_settings(run_dir) or {}).get("resume")
    return said if isinstance(said, str) and said != "auto" else None


def _names(path: str, checkpoint: str) -> bool:
    """Whether a path names this checkpoint, or the run that it is of."""
    named, it = (Path(each).expanduser().absolute() for each in (path, checkpoint))
    return named in (it, it.parent, it.parent.parent)


def _once_more(origin: str, run_dir: Path) -> Checkpoint:
    try:
        return folder.resolve(origin)
    except CheckpointError as error:
        raise CheckpointError(
            f"output_dir={run_dir} holds a run that began from {origin}, and has no checkpoint of its own: {error}; or "
            "begin in a new output_dir"
        ) from error


def as_kept(config: RunConfig, checkpoint: Checkpoint | None, run_dir: Path) -> RunConfig:
    """The config as the run's folder keeps it: `resume` names the other run's checkpoint that this one began from."""
    if checkpoint is None or checkpoint.path.is_relative_to((run_dir / folder.FOLDER).absolute()):
        return config
    return dataclasses.replace(config, tree={**config.tree, "resume": str(checkpoint.path)})


def put_aside(run_dir: Path) -> Path | None:
    """Where a run begins anew in a folder with metrics of an earlier one: give these a name of their own.

    `metrics-N.jsonl`, with the first N that is free; null where there are none.
    """
    if not holds_metrics(run_dir):
        return None
    path = run_dir / "metrics.jsonl"
    names = (path.with_name(f"metrics-{part}.jsonl") for part in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def finished(checkpoint: Checkpoint, max_steps: int | None) -> str | None:
    """What to say where a run has no step left to take."""
    at = checkpoint.driver["at"]
    if max_steps is None and settings_of(checkpoint).get("max_steps") is not None:
        return None  # a pass over the data, and how long that is nobody knows yet
    steps = int(at["of"]) if max_steps is None else max_steps
    if not at["is_main"] or int(at["number"]) < steps:
        return None
    more = "a larger max_steps goes on" if max_steps is not None else "max_steps=N above that goes on"
    return (
        f"finished already: {at['number']} of {steps} {at['stage']} steps are taken, and {checkpoint.path} has them "
        f"({more})"
    )


def kept_settings(run_dir: Path) -> Mapping[str, Any] | None:
    """The config of the run in this folder; null where it keeps none. Raises CheckpointError as `settings_of`."""
    path = run_dir / "config.yaml"
    return _settings(path) if path.exists() else None


def settings_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The config of the run that wrote it. Raises CheckpointError where it cannot be read."""
    return _settings(checkpoint.config)


def _settings(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no config")
    return found


def other_content(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each model, and for the dataset, whose content differs from that of the checkpoint's run.

    As far as `now` tells it: models are known before data is.
    """
    for name in sorted({*before["models"], *now["models"]} if "models" in now else ()):
        was, is_now = (each["models"].get(name) for each in (before, now))
        if was is None or is_now is None or was["sha256"] != is_now["sha256"]:
            paths = [each["path"] if each else "not there" for each in (was, is_now)]
            yield f"{name} was {paths[0]}, and is {paths[1]}" + (", with other content" if paths[0] == paths[1] else "")
    was, is_now = before.get("data"), now.get("data")
    if was is not None and is_now is not None and was != is_now:
        same = was["rows"] == is_now["rows"]
        yield f"data had {was['rows']} rows, and has {is_now['rows']}" + (" of other content" if same else "")


def refuse_others(checkpoint: Checkpoint | None, about: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint is one of other models, or of other data, than these."""
    if checkpoint is not None and (changed := list(other_content(checkpoint.driver["about"], about))):
        raise CheckpointError(
            f"{checkpoint.path} is of another run:\n" + "\n".join(f"  {line}" for line in changed) + "\nGive it the "
            "same, or begin in a new output_dir with resume=false"
        )


async def go_on(algorithm: Algorithm, checkpoint: Checkpoint | None, about: Mapping[str, Any]) -> None:
    """Bring an algorithm that has not run, and all that it is given, to where a checkpoint was taken.

    Null: to the beginning. `about`: the fingerprints of this run.

    Raises CheckpointError where it is one of other models or data, or cannot be read.
    """
    job = algorithm.job
    if checkpoint is None:
        if job.telemetry.last_step:
            job.telemetry.event(f"no whole checkpoint in {job.telemetry.run_dir}: the run begins anew")
        job.telemetry.go_back(0)
        return
    driver = checkpoint.driver
    refuse_others(checkpoint, about)
    rows = await read_rows(checkpoint.rows, use_ray=job.config.use_ray)
    async with algorithm.turn("checkpoint"):
        await algorithm.train.load(str(checkpoint.train))  # type: ignore[attr-defined]
    if job.sync is not None:
        job.sync.version = int(driver["weight_version"])
    job.telemetry.go_back(checkpoint.step, driver["telemetry"])
    for hook in job.hooks:
        if state := driver["hooks"].get(type(hook).__name__):
            hook.restore(state)
    algorithm.restore(Step(**driver["at"]), State(driver["algorithm"], rows))
    job.telemetry.event(f"going on behind step {checkpoint.step}, from {checkpoint.path}")


def check_trainer(role: type) -> None:
    """Raises ConfigError for a train role without checkpoints."""
    if inspect.getattr_static(role, "save") is inspect.getattr_static(TrainRole, "save"):
        raise ConfigError(
            f"train._target_={role.__module__}.{role.__name__} has no checkpoints: set checkpoint.every=null and "
            "resume=false, or override save, is_saving, finish_save and load"
        )
