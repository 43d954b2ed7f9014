"""The devices of a program with decorated classes: reserved once, lent to the groups, given back at the end."""

from __future__ import annotations

import atexit
import copy
import difflib
import functools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rolegraph.errors import ConfigError, RoleGraphError
from rolegraph.futures import refuse_in_loop, run_sync
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.placement import PlacementConfig, Plan, RoleRequest, Slot, plan, this_machine
from rolegraph.placement.device_groups import DeviceGroups
from rolegraph.placement.option import OPTION, parse_option, take_option
from rolegraph.role import Mesh

if TYPE_CHECKING:
    from rolegraph.cluster import Cluster
    from rolegraph.dispatch import AnyEndpoint
    from rolegraph.group import RoleGroup
    from rolegraph.reservation import Reservation

_declared: set[str] = set()
"""The groups of all decorated classes of this process."""
_current: Session | None = None


def declare(groups: Iterable[str]) -> None:
    """Note the groups of a decorated class: the workers that device groups may name."""
    _declared.update(groups)


def take_device_groups(argv: list[str] | None = None) -> dict[str, Any] | None:
    """The value of `--device_groups JSON` on this program's command line, null when it is not given.

    The option is taken out of `argv` (`sys.argv`), so that the program's own parser does not meet it.
    """
    words = sys.argv if argv is None else argv
    rest, text = take_option(words)
    words[:] = rest
    return None if text is None else parse_option(text)


def initialize(
    device_groups: Mapping[str, Any] | str | None = None,
    *,
    use_ray: bool = True,
    timeout_s: float = 30.0,
    ray_exp_name: str | None = None,
    output_dir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Session:
    """Reserve the devices of a program with decorated classes, before it constructs the first of them.

    Use it as `with initialize(...):`, which gives everything back at its end, however that comes; or call it, and
    everything is given back when the program ends, or by the `close()` of what it returns.

    device_groups: the groups as in `placement.device_groups`, as a mapping or as JSON; their workers are the groups of
        `@worker` and `@function`.
    use_ray: false runs each group in this process, as one actor whatever its ranks; device_groups may be left out.
    timeout_s: seconds to wait for the devices.
    ray_exp_name: names the program's actors on a cluster; null makes one up.
    output_dir: where the actors write their logs; null: outputs/PROGRAM/TIME.
    env: environment variables of the actors, which do not inherit those that this program sets for itself.

    Raises ConfigError for faulty groups and unknown workers, PlanError where they do not fit.
    """
    global _current
    if _current is not None:
        raise RoleGraphError("initialize() was called before, and its devices are not given back: close that one first")
    given = parse_option(device_groups) if isinstance(device_groups, str) else device_groups
    if given is None and use_ray:
        raise ConfigError(
            "initialize() needs device_groups: a mapping, take_device_groups() for those of the command line "
            f"({OPTION} JSON), or use_ray=False for one process"
        )
    named = None if given is None else _read(given)
    program = re.sub(r"[^\w.-]+", "-", Path(sys.argv[0]).stem) or "program"
    folder = Path(output_dir or Path("outputs", program, time.strftime("%Y-%m-%d_%H-%M-%S")))
    options = GraphOptions(
        exp_name=ray_exp_name or f"{program}-{os.getpid()}",
        run_dir=str(folder),
        use_ray=use_ray,
        timeout_s=timeout_s,
        env=dict(env or {}),
    )
    session = Session(named, options)
    session.open()
    _current = session
    return session


def current(worker: str) -> Session:
    """The session that a decorated class is constructed in; RoleGraphError when there is none."""
    if _current is None:
        raise RoleGraphError(
            f"{worker} is constructed before initialize(): its groups have no devices yet. Write "
            f"`with initialize(device_groups=...):` around it, or initialize(use_ray=False) to run in this process"
        )
    return _current


class _Faults:
    """Collects the faults of device groups, as the checker of a config does."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def fault(self, path: tuple[str | int, ...], text: str) -> None:
        """Note a fault of a key."""
        self.lines.append(f"{'.'.join(map(str, path))}: {text}")

    def unknown(self, key: str, names: Iterable[str], path: tuple[str | int, ...]) -> None:
        """Note a key that is not there."""
        close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.5)
        self.fault((*path, key), f"unknown key; {f'did you mean {close[0]}?' if close else 'use ' + ', '.join(names)}")


def _read(given: Any) -> DeviceGroups:
    """Checked groups whose workers are groups of decorated classes."""
    faults = _Faults()
    named = DeviceGroups.from_config(given, ("device_groups",), faults)
    if named is not None:
        where = "decorated classes are to be defined before initialize()"
        faults.lines += [f"{text} ({where})" for text in named.strangers(sorted(_declared), "program")]
    if faults.lines or named is None:
        raise ConfigError("\n  ".join(["the device groups cannot be used:", *faults.lines]))
    return named


class Session:
    """The devices of a program, and the graphs of the groups that run on them."""

    def __init__(self, named: DeviceGroups | None, options: GraphOptions) -> None:
        self.named = named
        self.options = options
        self.is_open = False
        self._plan: Plan | None = None
        self._owner: dict[str, str] = {}
        """The class whose object has a group's actors."""
        self._graphs: list[RoleGraph] = []
        self._groups: dict[str, RoleGroup[Any]] = {}
        self._cluster: Cluster | None = None
        self._reservation: Reservation | None = None

    def open(self) -> None:
        """Reserve the devices."""
        refuse_in_loop()
        self.is_open = True
        if not self.options.use_ray:
            return  # what runs in this process ends with it
        try:
            run_sync(self._reserve())
        except BaseException:
            self.close()
            raise
        # After Ray and the event loop have registered their own ends: the last one to register is the first to run.
        atexit.register(self.close)

    async def _reserve(self) -> None:
        from rolegraph.cluster import Cluster
        from rolegraph.nodes import cluster_inventory
        from rolegraph.reservation import Reservation

        assert self.named is not None
        self._cluster = Cluster.connect(this_machine().cpus)
        inventory = cluster_inventory() if self._cluster.is_joined else this_machine()
        requests = [RoleRequest(worker) for worker in self.named.workers()]
        self._plan = plan(
            inventory, requests, PlacementConfig(device_groups=self.named, timeout_s=self.options.timeout_s)
        )
        self._reservation = Reservation(self._plan, self.options.exp_name)
        await self._reservation.take(self.options.timeout_s)

    def claim(self, worker: str, groups: Sequence[str]) -> None:
        """Give groups to an object of the class `worker`; RoleGraphError when they have no devices or are taken."""
        for group in groups:
            if self.named is not None and group not in self.named.workers():
                listed = ", ".join(self.named.workers())
                raise RoleGraphError(
                    f"{worker} has functions in group {group}, and {self.named.key} gives it no devices: add it to the "
                    f"workers of one (they are {listed})"
                )
            if group in self._owner:
                raise RoleGraphError(
                    f"{worker} is constructed, and a {self._owner[group]} has the actors of group {group} already: one "
                    "object has a group's actors"
                )
        self._owner |= dict.fromkeys(groups, worker)

    def disclaim(self, groups: Sequence[str]) -> None:
        """Take groups back from an object that could not be constructed."""
        for group in groups:
            self._owner.pop(group, None)

    def frozen(
        self, worker: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of a construction as they are now, for one group."""
        try:
            if not self.options.use_ray:
                kept = copy.deepcopy((args, kwargs))
                return lambda: kept
            from ray import cloudpickle

            return functools.partial(pickle.loads, cloudpickle.dumps((args, kwargs)))
        except Exception as error:
            raise RoleGraphError(
                f"the arguments of {worker}(...) cannot be copied to its actors: {type(error).__name__}: {error}"
            ) from error

    def launch(self, roles: Mapping[str, RoleSpec]) -> dict[str, RoleGroup[Any]]:
        """Start the actors of some groups, each constructing its object; returns the groups by name."""
        graph = RoleGraph(self._plan_of(roles), roles, self.options, reservation=self._reservation)
        run_sync(graph.start())
        self._graphs.append(graph)
        self._groups |= graph.groups
        return {role: graph.groups[role] for role in roles}

    def _plan_of(self, roles: Iterable[str]) -> Plan:
        """The part of the plan that is about some groups."""
        if self._plan is None:
            slots = {role: (Slot(role, 0, "this machine", "cpu", (), 1.0, 1, Mesh()),) for role in roles}
            return Plan(slots, tuple((role,) for role in slots), "cpu")
        groups = [tuple(role for role in group if role in roles) for group in self._plan.groups]
        return Plan({role: self._plan.roles[role] for role in roles}, tuple(g for g in groups if g), self._plan.device)

    def call(self, group: str, endpoint: AnyEndpoint, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a group and wait for its collected result."""
        if group not in self._groups:
            raise RoleGraphError(
                f"{endpoint.name}() is called, and the actors of group {group} have ended: call it inside the block of "
                "initialize(), or before close()"
            )
        return self._groups[group].submit_sync(endpoint, args, kwargs)

    def close(self) -> None:
        """End every actor and give the devices back; safe to call again."""
        global _current
        if _current is self:
            _current = None
        atexit.unregister(self.close)
        self.is_open = False
        self._groups = {}
        try:
            while self._graphs:
                run_sync(self._graphs.pop().stop())
        finally:
            reservation, self._reservation = self._reservation, None
            if reservation is not None:
                reservation.release()
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
