"""`RoleGraph`: starts the groups of a plan side by side, hands out their handles, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rolegraph.cluster import Cluster
from rolegraph.errors import PlanError, RoleError, RoleGraphError
from rolegraph.group import OnCall, RoleGroup, refuse_in_loop, run_sync, watch
from rolegraph.host import RoleSpec, free_port, process_env, tail, torch_env
from rolegraph.member import LocalMember, Member, Place, RayMember
from rolegraph.parcel import imported_from, pack
from rolegraph.placement import Plan, Slot
from rolegraph.reservation import Reservation
from rolegraph.role import Role, RoleContext

R = TypeVar("R", bound=Role)

OnReady = Callable[[str, Role], Awaitable[None]]
"""`on_ready(role, handle)`."""

PORT_ATTEMPTS = 3
"""Launches of a role whose rendezvous port another process took first."""
WATCH_EVERY_S = 1.0
"""Between two looks at which nodes are there, while roles start."""
TEARDOWN_S = 3.0
"""Seconds that roles get to tear down; what is not done by then is killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphOptions:
    """What the graph tells its roles about the run."""

    exp_name: str = "rolegraph"
    """Two runs on one cluster need two names."""
    run_dir: str = "."
    """Where actors write their logs, in `logs/ROLE-RANK.log`."""
    seed: int = 0
    deterministic: bool = False
    use_ray: bool = True
    """false runs every role in this process; one rank each."""
    timeout_s: float = 30.0
    """Seconds to wait for devices."""
    setup_timeout_s: float | None = None
    """Seconds from the start of a role's processes until all are set up; null waits as long as needed."""
    python_path: tuple[str, ...] = ()
    """Folders that actors can import from, beside those of this process."""
    code: tuple[str, ...] = ()
    """More folders that user code is imported from, plugins' for one; nodes that lack them get their Python files."""
    ship_code: bool = True
    """Whether to copy the user's code to nodes that do not have it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes of all roles."""


def _interrupt(*_: object) -> None:
    """Do what Ctrl-C does, also where it does nothing: a shell lets the background jobs of a script ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


class RoleGraph:
    """The running roles of one plan.

    Use it as `async with RoleGraph(...) as graph` (or plain `with`), and take handles by `graph.handle(name, Class)`.
    However the block ends, Ctrl-C and SIGTERM included, every actor, child process and reserved device is freed.
    """

    def __init__(
        self,
        plan: Plan,
        roles: Mapping[str, RoleSpec],
        options: GraphOptions | None = None,
        *,
        on_call: OnCall | None = None,
        on_ready: OnReady | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        """`reservation`: one that holds the devices of the roles already, and goes on to when the graph stops.

        `on_ready(role, handle)` is awaited for each role once it is set up. With it, roles that share GPUs start one
        after another, so that each can make room for the next: engines look at the free memory when they start.
        """
        if odd := set(plan.roles) ^ set(roles):
            raise RoleGraphError(f"plan and roles differ in: {', '.join(sorted(odd))}")
        self.plan = plan
        self.roles = dict(roles)
        self.options = options or GraphOptions()
        self.on_call = on_call
        self.on_ready = on_ready
        self.groups: dict[str, RoleGroup[Any]] = {}
        self.startup: dict[str, float] = {}
        """Seconds from the start of the graph until each role was ready."""
        self._cluster: Cluster | None = None
        self._lent = reservation
        self._reservation: Reservation | None = None
        self._code: Any = None
        self._shipped: list[str] = []
        self._launched: list[Member] = []
        self._old_sigterm: Any = None
        self._old_env: dict[str, str | None] = {}

    def handle(self, role: str, kind: type[R]) -> R:
        """The typed handle of a role: `kind` is its class or a base of it."""
        group = self.group(role)
        if not issubclass(group.role_class, kind):
            raise RoleGraphError(f"role {role} is a {group.role_class.__name__}, not a {kind.__name__}")
        return cast(R, group.handle)

    def group(self, role: str) -> RoleGroup[Any]:
        """The group of a role."""
        if role not in self.groups:
            raise RoleGraphError(f"no running role {role!r}; there are: {', '.join(self.groups) or 'none'}")
        return self.groups[role]

    async def start(self) -> None:
        """Start all roles side by side; when one fails, everything is freed and its error raised."""
        began = time.perf_counter()
        try:
            if self.options.use_ray:
                cores = sum(slot.cores for slots in self.plan.roles.values() for slot in slots)
                self._cluster = Cluster.connect(cores)
            self._catch_sigterm()  # After Ray, which has a handler of its own.
            if self.options.use_ray:
                self._reservation = self._lent
                if self._reservation is None:
                    self._reservation = Reservation(self.plan, self.options.exp_name)
                    await self._reservation.take(self.options.timeout_s)
                self._ship_code()
            locks = {group: asyncio.Lock() for group in self.plan.groups}
            launches = [asyncio.ensure_future(self._start_in_turn(role, began, locks)) for role in self.plan.roles]
            started: asyncio.Future[Any] = asyncio.gather(*launches)
            watcher: asyncio.Future[Any] = asyncio.ensure_future(self._watch_nodes())
            try:
                await asyncio.wait([started, watcher], return_when=asyncio.FIRST_COMPLETED)
                groups = await (started if started.done() else watcher)
            finally:
                # When one role has failed the others still run.
                for task in (started, watcher, *launches):
                    task.cancel()
            self.groups = dict(zip(self.plan.roles, groups, strict=True))
        except BaseException:
            await self._free(teardown=False)
            raise

    async def stop(self) -> None:
        """Tear down, kill and free everything; safe to call again."""
        await self._free(teardown=True)

    async def _start_in_turn(
        self, role: str, began: float, locks: Mapping[tuple[str, ...], asyncio.Lock]
    ) -> RoleGroup[Any]:
        waits = self.on_ready is not None and self.plan.roles[role][0].device == "cuda"
        async with locks[self.plan.group_of(role)] if waits else nullcontext():
            group = await self._start_role(role, began)
            if self.on_ready is not None:
                await self.on_ready(role, group.handle)
        return group

    async def _start_role(self, role: str, began: float) -> RoleGroup[Any]:
        slots = self.plan.roles[role]
        for attempt in range(1, PORT_ATTEMPTS + 1):
            make = self._ray_members if self.options.use_ray else self._local_members
            members = make(role, slots, attempt)
            self._launched += members
            group: RoleGroup[Any] = RoleGroup(
                self.roles[role].role_class,
                members,
                slots[0].mesh,
                is_deterministic=self.options.deterministic,
                on_call=self.on_call,
            )
            try:
                await self._set_up(group)
            except RoleError as error:
                if "address already in use" not in error.message.lower() or attempt == PORT_ATTEMPTS:
                    raise
                _log.warning("the rendezvous port of %s was taken by another process; starting it again", role)
                for member in members:
                    member.kill()
                continue
            self.startup[role] = time.perf_counter() - began
            return group
        raise AssertionError("the loop returns or raises")

    def _ship_code(self) -> None:
        """Put the user's folders into the object store, where some rank is on another node than this program."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        reservation = cast(Reservation, self._reservation)
        if self.options.ship_code and any(node.id != here for node in reservation.nodes.values()):
            folders = pack(self.options.python_path, [*self.options.code, *imported_from()])
            self._code, self._shipped = ray.put(folders), [folder.path for folder in folders]

    async def _set_up(self, group: RoleGroup[Any]) -> None:
        """Introduce the ranks to each other and set them up, within the time that a role gets for it."""
        limit = self.options.setup_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._meet(group)
                await group.start()
        except TimeoutError:
            message = (
                f"it is not set up after placement.setup_timeout_s={limit:g} seconds (null waits as long as needed)"
            )
            raise await group.explain_slow_start(message) from None

    def still_starting(self) -> list[str]:
        """The roles that are not ready, each with the last line of its log where that can be read from here."""
        found = []
        for role in self.plan.roles:
            if role in self.startup:
                continue
            logs = [tail(member.log_file, 1) for member in self._launched if member.context.role == role]
            last = next((log.splitlines()[-1] for log in logs if log.startswith("End of")), "")
            found.append(role + (f" (its log ends: {last.strip()[:120]})" if last.strip() else ""))
        return found

    async def _watch_nodes(self) -> None:
        """Raise when a node leaves while roles start: an actor that waits for a place there would wait for ever."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._reservation is not None:
                self._reservation.raise_for_lost_nodes()

    async def _meet(self, group: RoleGroup[Any]) -> None:
        """Tell every rank where it is, and the address and a free port of rank 0's node."""
        members = [member for member in group.members if isinstance(member, RayMember)]
        places: list[Place] = await group.together([member.locate() for member in members], "setup")
        nodes = [place.node_id for place in places]
        for rank, (member, place) in enumerate(zip(members, places, strict=True)):
            member.settle(
                node=cast(Reservation, self._reservation).node_name(place.node_id, place.address),
                address=place.address,
                local_rank=nodes[:rank].count(place.node_id),
                local_world_size=nodes.count(place.node_id),
                master_addr=places[0].address,
                master_port=places[0].port,
            )

    def _context(self, role: str, slot: Slot, device_ids: tuple[str, ...]) -> RoleContext:
        options = self.options
        return RoleContext(
            role=role,
            rank=slot.rank,
            world_size=len(self.plan.roles[role]),
            mesh=slot.mesh,
            device=slot.device,
            device_ids=device_ids,
            node=slot.node,
            threads=slot.threads,
            seed=options.seed,
            deterministic=options.deterministic,
            run_dir=str(Path(options.run_dir).resolve()),
            exp_name=options.exp_name,
        )

    def _ray_members(self, role: str, slots: tuple[Slot, ...], attempt: int) -> list[Member]:
        from ray import cloudpickle

        from rolegraph.actor import Launch, actor_class

        spec, reservation = self.roles[role], cast(Reservation, self._reservation)
        pickled = cloudpickle.dumps(spec)
        make = actor_class(spec.role_class)
        sys_path = [*self.options.python_path, *(str(Path(path).resolve()) for path in sys.path), *self._shipped]
        members: list[Member] = []
        for slot in slots:
            seat = reservation.seat(slot)
            context = self._context(role, slot, seat.device_ids)
            log_file = str(Path(self.options.run_dir, "logs", f"{role}-{slot.rank}.log").resolve())
            env = {
                **process_env(slot.threads, seat.device_ids),
                **spec.role_class.environment,
                **self.options.env,
                **spec.env,
            }
            # What a role names itself is there from the start of the process, where its allocator reads it; Ray then
            # starts a worker for it, so the rest, which differs from rank to rank, is set in one that waits.
            early = {"env_vars": {name: env[name] for name in spec.role_class.environment}}
            started_with = {"runtime_env": early} if spec.role_class.environment else {}
            launch = Launch(pickled, context, env, sys_path, log_file, self._code)
            name = f"{self.options.exp_name}/{role}/{slot.rank}" + (f" try {attempt}" if attempt > 1 else "")
            try:
                actor = make.options(name=name, namespace="rolegraph", **seat.options, **started_with).remote(launch)
            except ValueError as error:
                if "name" not in str(error):
                    raise
                raise PlanError(
                    f"a run named {self.options.exp_name!r} is on this cluster already: give this one another "
                    "ray_exp_name"
                ) from error
            members.append(RayMember(actor, context, log_file, reservation.lost_message))
        return members

    def _local_members(self, role: str, slots: tuple[Slot, ...], attempt: int) -> list[Member]:
        if len(slots) > 1:
            raise PlanError(
                f"use_ray=false runs every role in this process, one rank each, and {role} has {len(slots)}: "
                "set use_ray=true, or one rank"
            )
        device_ids = tuple(map(str, slots[0].device_ids))
        context = replace(self._context(role, slots[0], device_ids), master_port=free_port())
        spec = self.roles[role]
        self._set_env({**torch_env(context), **spec.role_class.environment, **self.options.env, **spec.env})
        return [LocalMember(self.roles[role], context)]

    def _set_env(self, env: Mapping[str, str]) -> None:
        """Change this process's environment until the graph stops."""
        for name, value in env.items():
            self._old_env.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore_env(self) -> None:
        old, self._old_env = self._old_env, {}
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _free(self, *, teardown: bool) -> None:
        """Everything that was started, in the reverse order; each step has its time, none stops the next."""
        groups, self.groups = self.groups, {}
        launched, self._launched = self._launched, []
        try:
            if teardown and groups:
                stops = [asyncio.ensure_future(group.stop()) for group in groups.values()]
                done, late = await asyncio.wait(stops, timeout=TEARDOWN_S)
                for stop in late:
                    stop.cancel()
                for stop in done:
                    if (error := stop.exception()) is not None:
                        _log.warning("teardown: %s", error)
            ends = [watch(member.end_children().future) for member in launched if member.alive]
            if ends:
                # A member that does not answer hangs or is gone.
                await asyncio.wait(ends, timeout=1.0)
        finally:
            for member in launched:
                member.kill()
            self._code = None
            reservation, self._reservation = self._reservation, None
            if reservation is not None and reservation is not self._lent:
                reservation.release()
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.stop()
            self._restore_env()
            self._restore_sigterm()

    def _catch_sigterm(self) -> None:
        """SIGTERM ends the program the way Ctrl-C does, so that it frees what it holds."""
        if threading.current_thread() is threading.main_thread():
            self._old_sigterm = signal.signal(signal.SIGTERM, _interrupt)

    def _restore_sigterm(self) -> None:
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        refuse_in_loop()
        run_sync(self.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_sync(self.stop())
