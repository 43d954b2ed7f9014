"""The processes in which reward functions run: a nursery, and the workers it forks.

The nursery imports the verifiers' libraries once and runs no function, so it is always there to answer: it forks a
worker in milliseconds, kills one that hangs together with whatever that started, and says how one ended. It reads from
one socket; when its parent dies, by whatever means, it reads the end of that and takes all workers with it. Users'
modules are imported in the workers only: a module that starts threads would not survive a fork.

Workers are no `multiprocessing` children: those run the parent's main module again, which inside a Ray actor is Ray's,
and end with the thread that started them, not with the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import itertools
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from rolegraph.plugins import load_plugins
from rolegraph.rewards import registry
from rolegraph.rewards.functions import WARM_UP

_PR_SET_PDEATHSIG = 1
_DETAIL_CHARACTERS = 4000
MOST_STEPS = 100_000
"""Scores of one response that a function may give: more are none it was asked for."""


@dataclass(frozen=True)
class Setup:
    """What a nursery is told when it starts."""

    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    """Target and settings of each."""
    plugins: tuple[str, ...]
    scores_steps: bool = False
    """Whether the functions take steps, and give a list of scores for each response."""


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    function: int
    completions: list[Any]
    """Texts; for functions that score steps, the steps of each response."""
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class Scored:
    """What a function gave: a finite number a row, or None with the reason why not."""

    values: list[float | None]
    reasons: list[str | None]
    """Of functions that score steps, why a row has none, or why the first step without a score has none."""
    steps: list[list[float | None]] = field(default_factory=list)
    """Of functions that score steps, in place of values: what they gave for each row; nothing for one without."""


@dataclass(frozen=True)
class Fault:
    """A call that gave nothing."""

    reason: str
    detail: str


def nursery(descriptor: int) -> None:
    """Run a nursery until the other end of the socket is closed."""
    control = Connection(descriptor)
    parent = os.getppid()
    children: set[int] = set()
    try:
        setup: Setup = control.recv()
        try:
            for target, _ in setup.functions:
                WARM_UP.get(target, lambda: None)()
        except Exception:  # the parent raises it
            control.send(traceback.format_exc())
            return
        control.send(None)
        while True:
            # A copy of the other end may live on in a fork of the parent: then only its number tells that it died.
            if not control.poll(2.0):
                if os.getppid() != parent:
                    return
                continue
            pid: int | None = control.recv()
            if pid is None:
                children.add(_fork(control, setup))
            else:
                control.send(_end(pid))
                children.discard(pid)
    except (EOFError, OSError):
        pass
    finally:
        for pid in children:
            _end(pid)


def _fork(control: Connection, setup: Setup) -> int:
    descriptor = recv_handle(control)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            _serve(Connection(descriptor), setup)
            status = 0
        except BaseException:  # a fork must never return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(descriptor)
    control.send(pid)
    return pid


def _end(pid: int) -> int:
    """Kill a worker and what it started; returns its wait status, which is its own if it had ended by itself."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except OSError:
            continue
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _serve(connection: Connection, setup: Setup) -> None:
    """Answer calls until the other end is closed."""
    _live_and_die_with_parent()
    try:
        load_plugins(setup.plugins)
        functions = [registry.resolve(target, kwargs) for target, kwargs in setup.functions]
        connection.send([registry.wants(function) for function in functions])
    except BaseException:  # the parent raises it
        connection.send(traceback.format_exc())
        return
    with asyncio.Runner() as runner:
        while True:
            try:
                call: Call = connection.recv()
            except (EOFError, OSError):
                return
            connection.send(_answer(functions[call.function], call, runner, setup.scores_steps))


def _live_and_die_with_parent() -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            # When memory runs out, a worker is the one to go: it is replaced, where the actor around it is not.
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError:
            pass


def _answer(function: Callable[..., Any], call: Call, runner: asyncio.Runner, scores_steps: bool) -> Scored | Fault:
    try:
        result = function(call.completions, **call.columns)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        return (_checked_steps if scores_steps else _checked)(result, len(call.completions))
    except BaseException as error:  # sys.exit in a function is a fault as any other
        text = traceback.format_exc()[-_DETAIL_CHARACTERS:]
        return Fault("exception", text or type(error).__name__)


async def _awaited(result: Any) -> Any:
    return await result


def _checked(result: Any, rows: int) -> Scored | Fault:
    """Turn what a function returned into plain numbers: nothing else of it travels."""
    values = _listed(result, rows)
    if isinstance(values, Fault):
        return values
    checked = [_number(value) for value in values]
    return Scored([value for value, _ in checked], [reason for _, reason in checked])


def _checked_steps(result: Any, rows: int) -> Scored | Fault:
    """The same for a function that gives a list of numbers a row."""
    values = _listed(result, rows)
    if isinstance(values, Fault):
        return values
    scored = Scored([None] * rows, [], [])
    for value in values:
        odd = value is None or not _is_listing(value)
        checked = [] if odd else [_number(score) for score in itertools.islice(value, MOST_STEPS)]
        scored.steps.append([score for score, _ in checked])
        why = "none" if value is None else "not_a_list" if odd else None
        scored.reasons.append(why or next((reason for _, reason in checked if reason), None))
    return scored


def _listed(result: Any, rows: int) -> list[Any] | Fault:
    if not _is_listing(result):
        return Fault("not_a_list", f"returned {type(result).__name__}, not a list of {rows} values")
    values = list(itertools.islice(result, rows + 1))
    if len(values) != rows:
        had = "more" if len(values) > rows else str(len(values))
        return Fault("wrong_length", f"returned {had} values for {rows} completions")
    return values


def _is_listing(value: Any) -> bool:
    return not isinstance(value, str | bytes | Mapping) and hasattr(value, "__iter__")


def _number(value: Any) -> tuple[float | None, str | None]:
    if value is None:
        return None, "none"
    # float() would also take strings; numpy's and torch's scalars are taken by their __float__.
    if isinstance(value, complex) or not hasattr(value, "__float__"):
        return None, "not_a_number"
    try:
        number = float(value)
    except OverflowError:
        return None, "not_finite"
    except Exception:  # a value's own conversion may raise anything
        return None, "not_a_number"
    return (number, None) if math.isfinite(number) else (None, "not_finite")


def bootstrap(path: Sequence[str], descriptor: int) -> list[str]:
    """The command that starts a nursery: this interpreter, with the import path of this process."""
    code = (
        f"import sys; sys.path[:] = {list(path)!r}; from rolegraph.rewards.worker import nursery; nursery({descriptor})"
    )
    return [sys.executable, "-c", code]
