"""Members of a group that run a role in threads of this process, and can die."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rolegraph.errors import RoleError
from rolegraph.group import RoleGroup
from rolegraph.member import LocalSent
from rolegraph.recovery import Rescue
from rolegraph.role import Mesh, Role, RoleContext


class DiedError(Exception):
    """What the calls of a dead member end in."""


class Mortal:
    """One role object; `die` fails what it works on and all that comes later, as the kill of a process does."""

    log_file = None

    def __init__(self, role: Role) -> None:
        self.role = role
        self.context = role.context
        self.alive = True
        """Whether a call has found it dead."""
        self.is_gone = False
        self._pool = ThreadPoolExecutor(8)
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def die(self) -> None:
        with self._lock:
            self.is_gone = True
            lost = list(self._open)
        for future in lost:
            future.set_exception(DiedError("killed"))

    kill_calls = 0

    def kill(self) -> None:
        self.alive = False
        self.kill_calls += 1
        if not self.is_gone:
            self.die()

    def send(self, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalSent:
        return self._run(lambda: getattr(type(self.role), endpoint.name)(self.role, *args, **kwargs))

    def metrics(self) -> LocalSent:
        return self._run(dict)

    def _run(self, work: Any) -> LocalSent:
        future: Future[Any] = Future()
        with self._lock:
            self._open.add(future)
            is_gone = self.is_gone
        if is_gone:
            future.set_exception(DiedError("killed before"))
            return LocalSent(future)

        def run() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = work()
            except Exception as raised:
                error = raised
            with self._lock:
                if self.is_gone or future.done():
                    return
                self._open.discard(future)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._pool.submit(run)
        return LocalSent(future)

    def explain(self, error: BaseException, endpoint: str) -> RoleError:
        if isinstance(error, DiedError):
            self.alive = False
            return RoleError(f"the actor died: {error}", role=self.context.role, rank=self.context.rank)
        return RoleError(repr(error), role=self.context.role, rank=self.context.rank, endpoint=endpoint)


class Colony:
    """A group of mortals, and the rescue that makes new ones; `fails` counts starts that do not succeed."""

    def __init__(self, kind: type[Role], ranks: int = 2, *, config: Any = None, mesh: Mesh | None = None) -> None:
        self.kind, self.ranks, self.config = kind, ranks, config
        self.made: list[Mortal] = []
        self.told: list[str] = []
        self.restarts = 0
        self.fails = 0
        self.group: RoleGroup[Any] = RoleGroup(kind, self.make(range(ranks)), mesh or Mesh(dp=ranks))  # type: ignore[arg-type]

    def make(self, ranks: Sequence[int]) -> list[Mortal]:
        new = [
            Mortal(self.kind(self.config, RoleContext(role="fake", rank=rank, world_size=self.ranks))) for rank in ranks
        ]
        for mortal in new:
            mortal.role.colony, mortal.role.member = self, mortal  # type: ignore[attr-defined]
            mortal.role.setup()
        self.made += new
        return new

    def rescue(self, max_restarts: int = 2, **options: Any) -> RoleGroup[Any]:
        """The group, which starts its dead again from now on."""

        async def start(ranks: tuple[int, ...]) -> list[Mortal]:
            assert not any(self.group.members[rank].alive for rank in ranks), "the old ones are gone"
            if self.fails:
                self.fails -= 1
                raise RoleError("no weights here", role="fake", rank=ranks[0])
            return self.make(ranks)

        def restarted() -> None:
            self.restarts += 1

        tell = self.told.append
        self.group.rescue(Rescue(max_restarts, start, tell=tell, restarted=restarted, **options))  # type: ignore[arg-type]
        return self.group
