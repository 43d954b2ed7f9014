"""Rules on checkpoints, and on runs that go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.config.schema import RunConfig
from rolegraph.config.turn_rules import says


def resuming_is_possible(run: RunConfig) -> Iterator[str]:
    """A run that goes on has an algorithm that can, and a folder to go on in."""
    if not run.resume:
        return
    shown = "true" if run.resume is True else run.resume
    saves = says(run.algorithm.target, "can_save")
    if not saves and not says(run.algorithm.target, "can_resume"):
        yield f"resume={shown} does not work with {run.algorithm.name}: remove it and begin in a new output_dir"
    elif isinstance(run.resume, str) and run.resume != "auto":
        if not saves:
            yield (
                f"resume={shown} names a checkpoint, and {run.algorithm.name} writes none: set resume=true or auto, "
                "which go on in output_dir"
            )
    elif run.output_dir is None:
        yield f"resume={shown} goes on in the folder of an earlier run: name that folder, output_dir=..."


def checkpoints_can_be_made(run: RunConfig) -> Iterator[str]:
    """The algorithm says what it needs to go on, and there is a role that is trained."""
    every = run.checkpoint.every
    if every is None or says(run.algorithm.target, "can_save"):
        return
    if says(run.algorithm.target, "can_resume"):
        yield (
            f"checkpoint.every={every} has no effect with {run.algorithm.name}, which goes on by resume=true without "
            "checkpoints: remove it"
        )
    else:
        yield (
            f"checkpoint.every={every} does not work with {run.algorithm.name}, which has a `run` of its own and no "
            "`state`: remove it, or define `state` and `restore` beside `run`"
        )


def checkpoints_that_stay(run: RunConfig) -> Iterator[str]:
    """What is said of checkpoints has checkpoints, and the best ones have a metric."""
    said, default = run.checkpoint, CheckpointConfig()
    changed = [field.name for field in fields(said) if getattr(said, field.name) != getattr(default, field.name)]
    if said.every is None:
        for name in changed:
            yield f"checkpoint.{name} has no effect without checkpoints: set checkpoint.every, or remove it"
        return
    if said.keep_best and said.metric is None:
        yield (
            f"checkpoint.keep_best={said.keep_best} needs a metric to compare by: set checkpoint.metric, as in "
            "checkpoint.metric=reward/mean"
        )
    if said.keep_best and said.keep_last is None:
        yield "checkpoint.keep_best has no effect with keep_last=null, which keeps all: remove it, or set keep_last"
    for name in ("metric", "best"):
        if name in changed and not said.keep_best:
            yield f"checkpoint.{name} has no effect with keep_best=0: set checkpoint.keep_best, or remove it"
    if said.keep_best and said.metric is not None:
        yield from _measured(run, said.metric)


def _measured(run: RunConfig, metric: str) -> Iterator[str]:
    """Metrics of evaluation are called by their set; what steps measure shows with the first one."""
    first, _, rest = metric.partition("/")
    name, sets = rest.partition("/")[0], run.eval.sets
    if first != "eval" or name in sets:
        return
    there = f"eval.sets has {', '.join(sets)}" if sets else "the run has none: choose eval=arithmetic, or add one"
    yield f"checkpoint.metric={metric} is of an eval set {name!r}, and {there}"
