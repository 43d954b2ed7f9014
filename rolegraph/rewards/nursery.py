"""The parent's side of the processes that run reward functions: starting, calling under a deadline, replacing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from rolegraph.errors import RewardError
from rolegraph.rewards.registry import Wants
from rolegraph.rewards.worker import Call, Fault, Scored, Setup, bootstrap

_ENVIRONMENT = {
    # Workers are the parallelism; a library's own threads would fight over the same cores, and not survive a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Sets of strings have one order in every worker and every run.
    "PYTHONHASHSEED": "0",
}


class Nursery:
    """Starts and ends workers, through one process that is forked from. Thread-safe."""

    def __init__(self, setup: Setup, start_timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._closed = False

    def fork(self) -> tuple[int, Connection]:
        """A new worker: its process id and the connection to it. Starts the nursery when there is none."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self._lock:
            try:
                pid = self._ask_fork(theirs)
            except (EOFError, OSError):
                # The nursery is gone (killed from outside): start another one, once.
                self._stop()
                pid = self._ask_fork(theirs)
            return pid, Connection(ours.detach())

    def _ask_fork(self, end: socket.socket) -> int:
        control = self._control or self._start()
        control.send(None)
        send_handle(control, end.fileno(), None)
        pid: int = control.recv()
        return pid

    def end(self, pid: int) -> str:
        """Kill a worker if it still runs; returns in words how it ended."""
        with self._lock:
            try:
                if self._control is None:
                    return "ended with its pool"
                self._control.send(pid)
                return _ending(self._control.recv())
            except (EOFError, OSError):
                return "ended with its nursery"

    def close(self) -> None:
        """End the nursery and all workers."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> Connection:
        if self._closed:
            raise RewardError("the verifier pool is closed")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                bootstrap(sys.path, theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                # Ctrl-C is for the program, which ends the nursery in its own order.
                start_new_session=True,
            )
            control = self._control = Connection(ours.detach())
        control.send(self._setup)
        problem: str | None = "it did not answer"
        try:
            if control.poll(self._timeout_s):
                problem = control.recv()
        except (EOFError, OSError):
            problem = "its process ended (see the output above)"
        if problem is not None:
            self._stop()
            raise RewardError(f"the reward functions' libraries cannot be imported:\n{problem}")
        return control

    def _stop(self) -> None:
        control, process, self._control, self._process = self._control, self._process, None, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Worker:
    """One worker process, replaced when it is lost. Used by one thread at a time."""

    def __init__(self, nursery: Nursery, start_timeout_s: float) -> None:
        self._nursery = nursery
        self._timeout_s = start_timeout_s
        self._pid: int | None = None
        self._connection: Connection | None = None

    def start(self) -> list[Wants]:
        """Fork and load the functions; returns what each wants. Raises RewardError when that fails."""
        self._pid, connection = self._nursery.fork()
        self._connection = connection
        loaded: list[Wants] | str = f"no answer within {self._timeout_s:g} s"
        try:
            if connection.poll(self._timeout_s):
                loaded = connection.recv()
        except (EOFError, OSError):
            loaded = f"the process {self.stop()}"
        if isinstance(loaded, str):
            self.stop()
            raise RewardError(f"the reward functions cannot be loaded:\n{loaded}")
        return loaded

    def send(self, call: Call) -> None:
        """Hand a call to the process, to a new one where the last is lost. Raises RewardError where none starts."""
        if self._connection is not None:
            try:
                return self._connection.send(call)
            except OSError:
                # It died while it was idle, which this call has nothing to do with.
                self.stop()
        self.start()
        if self._connection is None:
            raise RewardError("the worker was stopped")
        return self._connection.send(call)

    def answer(self, limit_s: float) -> tuple[Scored | Fault, float]:
        """The answer to what was sent, and the seconds it took. One that hangs past `limit_s` or dies is a fault, and
        gone; its end takes none of these seconds."""
        started = time.monotonic()
        reply: Scored | Fault | None = None
        died = False
        try:
            if self._connection is not None and self._connection.poll(limit_s):
                reply = self._connection.recv()
        except (EOFError, OSError):
            died = True
        used = time.monotonic() - started
        if died:
            reply = Fault("crash", f"the worker {self.stop()}")
        elif reply is None:
            self.stop()
            reply = Fault("timeout", f"no answer within {limit_s:.3g} s")
        return reply, used

    def stop(self) -> str:
        """End the process; returns in words how it ended."""
        pid, connection, self._pid, self._connection = self._pid, self._connection, None, None
        if pid is None or connection is None:
            return "was not running"
        ending = self._nursery.end(pid)
        connection.close()
        return ending


def _ending(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    return f"was killed by signal {number} ({signal.strsignal(number)})"
