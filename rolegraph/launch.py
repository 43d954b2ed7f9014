"""Starting the actors of a plan's roles on their seats: for the first time, and again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rolegraph.errors import PlanError, RoleError
from rolegraph.group import RoleGroup
from rolegraph.host import RoleSpec, free_port, process_env, torch_env
from rolegraph.member import LocalMember, Member, Place, RayMember
from rolegraph.parcel import imported_from, pack
from rolegraph.placement import Plan, Slot
from rolegraph.reservation import Reservation
from rolegraph.role import RoleContext

WATCH_EVERY_S = 1.0
"""Between two looks at which nodes are there, while roles start."""


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


class Launcher:
    """Makes the members of a plan's roles, and sets groups of them up."""

    def __init__(self, plan: Plan, roles: Mapping[str, RoleSpec], options: GraphOptions) -> None:
        self.plan = plan
        self.roles = roles
        self.options = options
        self.reservation: Reservation | None = None
        """Where the seats are; null without Ray."""
        self.launched: list[Member] = []
        """All that were ever made, those that have died included."""
        self._tries: Counter[tuple[str, int]] = Counter()
        """How often each rank was started: the names of its actors differ."""
        self._local: dict[tuple[str, int], tuple[int, int]] = {}
        """Of each rank, its place on its node among the ranks of its role, and how many of them are there."""
        self._code: Any = None
        self._shipped: list[str] = []
        self._old_env: dict[str, str | None] = {}

    def ship_code(self) -> None:
        """Put the user's folders into the object store, where some rank is on another node than this program."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        reservation = cast(Reservation, self.reservation)
        if self.options.ship_code and any(node.id != here for node in reservation.nodes.values()):
            folders = pack(self.options.python_path, [*self.options.code, *imported_from()])
            self._code, self._shipped = ray.put(folders), [folder.path for folder in folders]

    def members(self, role: str, ranks: Sequence[int] | None = None) -> list[Member]:
        """New members for these ranks of a role, by default all, on the seats of the plan; they are not set up."""
        slots = self.plan.roles[role]
        chosen = slots if ranks is None else [slots[rank] for rank in ranks]
        for slot in chosen:
            self._tries[role, slot.rank] += 1
        made = (self._ray_members if self.options.use_ray else self._local_members)(role, chosen)
        self.launched += made
        return made

    async def set_up(self, group: RoleGroup[Any]) -> None:
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

    async def again(self, group: RoleGroup[Any], ranks: Sequence[int]) -> list[Member]:
        """New members for these ranks of a running group, set up; what is left of the old ones is killed first.

        Raises RoleError where they cannot be, or their node has left the cluster.
        """
        for rank in ranks:
            group.members[rank].kill()
        self._refuse_lost_nodes(group.role, ranks)
        fresh = group.of(self.members(group.role, ranks))
        setting_up = asyncio.ensure_future(self.set_up(fresh))
        try:
            while not setting_up.done():
                await asyncio.wait([setting_up], timeout=WATCH_EVERY_S)
                self._refuse_lost_nodes(group.role, ranks)
            await setting_up
        except BaseException:
            setting_up.cancel()
            for member in fresh.members:
                member.kill()
            raise
        return list(fresh.members)

    def _refuse_lost_nodes(self, role: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if lost := cast(Reservation, self.reservation).lost_message(self.plan.roles[role][rank].node):
                raise RoleError(lost, role=role, rank=rank)

    def forget(self) -> None:
        """Let go of what was shipped, and give this process its environment back."""
        self._code = None
        old, self._old_env = self._old_env, {}
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _meet(self, group: RoleGroup[Any]) -> None:
        """Tell every rank where it is, and the address and a free port of the first one's node."""
        members = [member for member in group.members if isinstance(member, RayMember)]
        places: list[Place] = await group.together([member.locate() for member in members], "setup")
        nodes = [place.node_id for place in places]
        whole = len(members) == len(self.plan.roles[group.role])
        for index, (member, place) in enumerate(zip(members, places, strict=True)):
            key = (group.role, member.context.rank)
            if whole:
                self._local[key] = (nodes[:index].count(place.node_id), nodes.count(place.node_id))
            local_rank, local_world_size = self._local[key]
            member.settle(
                node=cast(Reservation, self.reservation).node_name(place.node_id, place.address),
                address=place.address,
                local_rank=local_rank,
                local_world_size=local_world_size,
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

    def _ray_members(self, role: str, slots: Sequence[Slot]) -> list[Member]:
        from ray import cloudpickle

        from rolegraph.actor import Launch, actor_class

        spec, reservation = self.roles[role], cast(Reservation, self.reservation)
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
            tries = self._tries[role, slot.rank]
            name = f"{self.options.exp_name}/{role}/{slot.rank}" + (f" try {tries}" if tries > 1 else "")
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

    def _local_members(self, role: str, slots: Sequence[Slot]) -> list[Member]:
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
