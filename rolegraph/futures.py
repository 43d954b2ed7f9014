"""Calls as an event loop waits for them, and event loops for programs that have none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rolegraph.errors import RoleGraphError

T = TypeVar("T")


def watch(call: Future[T]) -> asyncio.Future[T]:
    """A future of this event loop that follows `call`; cancelling it leaves the call alone."""
    loop = asyncio.get_running_loop()
    watcher: asyncio.Future[T] = loop.create_future()

    def copy() -> None:
        if watcher.done():
            return
        if (error := call.exception()) is not None:
            watcher.set_exception(error)
            watcher.exception()  # A failure that nobody waits for any more is no news.
        else:
            watcher.set_result(call.result())

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may have ended before the call.
            loop.call_soon_threadsafe(copy)

    call.add_done_callback(wake)
    return watcher


def failed(future: asyncio.Future[Any]) -> bool:
    """Whether it has ended in an error."""
    return future.done() and not future.cancelled() and future.exception() is not None


_runners = threading.local()


def refuse_in_loop() -> None:
    """RoleGraphError when this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RoleGraphError("a blocking call inside an event loop would stop the whole program: await it instead")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from plain code, on an event loop that this thread keeps for it."""
    runner: asyncio.Runner | None = getattr(_runners, "runner", None)
    if runner is None:
        runner = _runners.runner = asyncio.Runner()
        atexit.register(runner.close)
    return runner.run(coroutine)
