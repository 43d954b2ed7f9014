"""`rolegraph checkpoints PATH`: which checkpoints there are, whether they are whole, and which of them go."""

from __future__ import annotations

import difflib
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rolegraph.checkpoints import folder
from rolegraph.checkpoints.folder import Checkpoint
from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.results import alone_in
from rolegraph.telemetry.progress import duration
from rolegraph.telemetry.tables import as_text

SHOWN = ("reward/mean", "loss")
"""The metric that is shown where none is asked for: the first of these that there is."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `rolegraph checkpoints --help` lists the options")


def main(words: Sequence[str]) -> int:
    """Run the command with these words; 1 where --verify has found a fault."""
    parser = _Parser(
        allow_abbrev=False, prog="rolegraph checkpoints", description="List, verify and prune the checkpoints of a run."
    )
    parser.add_argument("path", help="the folder of a run, its folder checkpoints, or one checkpoint")
    parser.add_argument("--verify", action="store_true", help="compare files with what the marker says of them")
    parser.add_argument("--metric", help="the metric that is shown, and that --keep-best goes by")
    parser.add_argument("--prune", action="store_true", help="remove all but those that --keep-last, --keep-best say")
    parser.add_argument("--keep-last", type=int, metavar="N", help="with --prune: how many of the newest stay")
    parser.add_argument(
        "--keep-best", type=int, metavar="N", help="with --prune: how many of the best stay beside them"
    )
    parser.add_argument("--best", choices=("max", "min"), help="with --keep-best: which metric is best (max)")
    given = parser.parse_args(list(words))
    _check(given)
    run_dir, named = _run_dir(given.path)
    there = [named] if named is not None else folder.listed(run_dir)
    _check_metric(given.metric, there)
    if given.prune:
        if named is not None:
            raise ConfigError(
                f"--prune removes all but some checkpoints of a run, and {given.path} is one of them: name the run, "
                f"{run_dir}"
            )
        _prune(run_dir, given)
        there = folder.listed(run_dir)
    faults = [] if named is not None else folder.unreadable(run_dir)
    _show(run_dir, there, given.metric, [] if named is not None else folder.partial(run_dir))
    for fault in faults:
        print(fault)
    return (_verify(there) if given.verify else 0) or int(given.verify and bool(faults))


def _check(given: Any) -> None:
    """Raise ConfigError for options that would be ignored, or that keep nothing."""
    if given.prune and given.keep_last is None:
        raise ConfigError("--prune needs to know how many stay: add --keep-last N")
    for name in ("keep_last", "keep_best", "best"):
        if getattr(given, name) is not None and not given.prune:
            raise ConfigError(f"--{name.replace('_', '-')} is for --prune: add it, or leave this one out")
    if given.prune and given.keep_last < 1:
        raise ConfigError(f"--keep-last {given.keep_last} keeps nothing to go on from: give 1 or more")
    if given.keep_best is not None and given.keep_best < 0:
        raise ConfigError(f"--keep-best {given.keep_best} says nothing: give 1 or more, or leave it out")
    if given.keep_best and given.metric is None:
        raise ConfigError("--keep-best needs a metric to compare by: add --metric NAME, as in --metric reward/mean")
    if given.best and not given.keep_best:
        raise ConfigError("--best has no effect without --keep-best N")


def _check_metric(metric: str | None, there: Sequence[Checkpoint]) -> None:
    """Raise ConfigError for a metric that no checkpoint has: all would be none of the best."""
    names = sorted({name for each in there for name in each.metrics})
    if metric is None or metric in names or not there:
        return
    near = difflib.get_close_matches(metric, names, n=3, cutoff=0.5)
    known = f"did you mean {' or '.join(near)}?" if near else f"they have {', '.join(names) or 'none'}"
    raise ConfigError(f"--metric {metric}: no checkpoint has it; {known}")


def _run_dir(path: str) -> tuple[Path, Checkpoint | None]:
    """The folder of the run, and the checkpoint where the path is that of one."""
    given = Path(path).expanduser().absolute()
    if not given.is_dir():
        raise CheckpointError(f"{path} is no folder: name the folder of a run")
    if (found := folder.read(given)) is not None:
        return folder.run_dir_of(found), found
    run_dir = given.parent if given.name == folder.FOLDER else given
    if not (run_dir / folder.FOLDER).is_dir():
        folder.resolve(given)  # says what it is instead
    return run_dir, None


def _prune(run_dir: Path, given: Any) -> None:
    with alone_in(run_dir):
        halves = folder.remove_partial(run_dir)
        gone = folder.prune(
            run_dir,
            keep_last=given.keep_last,
            keep_best=given.keep_best or 0,
            metric=given.metric,
            best=given.best or "max",
        )
    for path in halves:
        print(f"removed {path}, which was not whole")
    for each in gone:
        print(f"removed {each.path}, {_size(each.size)}")


def _show(run_dir: Path, there: Sequence[Checkpoint], metric: str | None, halves: Sequence[Path]) -> None:
    metric = metric or next((name for name in SHOWN if any(name in each.metrics for each in there)), SHOWN[-1])
    now = time.time()
    rows: list[tuple[Any, ...]] = [
        (
            str(each.step),
            f"{duration(max(now - each.saved_at, 0))} ago",
            _size(each.size),
            each.metrics.get(metric),
            "yes",
            "yes" if each.hf.is_dir() else None,
        )
        for each in there
    ]
    rows += [(path.name.removeprefix("step-"), None, None, None, "no", None) for path in halves]
    print(f"{run_dir / folder.FOLDER}: {len(there)} whole" + (f", {len(halves)} not" if halves else ""))
    if rows:
        print(as_text([(("step", "saved", "size", metric, "whole", "hf"), rows)]))


def _verify(there: Sequence[Checkpoint]) -> int:
    faults = [f"step {each.step}: {fault}" for each in there for fault in each.verify()]
    print("\n".join(faults) if faults else f"verified: {len(there)} with all files as they were written")
    return 1 if faults else 0


def _size(size: int) -> str:
    """Bytes as a person says them.

    >>> _size(2_500_000_000), _size(1500)
    ('2.5 GB', '1.5 kB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
