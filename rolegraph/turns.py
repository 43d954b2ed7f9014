"""Whose turn it is on a device that several roles share, and what of each role is in its memory meanwhile.

`Turns` decides, and knows neither clocks nor handles; `TurnTaker` waits, calls the roles, and tells `Turns` what became
of it. Algorithms write `async with self.turn("generate"):`, and `PHASES` says what that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from rolegraph.errors import TurnError
from rolegraph.placement import PlacementConfig
from rolegraph.role import Role
from rolegraph.tenants import Rest, Tenant, tenant

Parts = tuple[str, ...]
"""What of a role moves by itself: `model` and `optimizer` of a trainer, `weights` and `kv_cache` of an engine."""


@dataclass(frozen=True)
class Phase:
    """What a stretch of a step needs on the devices of its roles."""

    needs: Mapping[str, Parts]
    """Parts by role that have to be there, with what they hold; a role without any still has its turn."""
    fills: Mapping[str, Parts] = field(default_factory=dict)
    """Parts by role that have to have their memory, and whose content is whole once the phase has ended well."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Everybody who works in the phase."""
        return tuple(dict.fromkeys((*self.needs, *self.fills)))

    def wakes(self, role: str) -> Parts:
        """Parts of `role` that have to be on the device."""
        return tuple(dict.fromkeys((*self.needs.get(role, ()), *self.fills.get(role, ()))))


PHASES: Mapping[str, Phase] = {
    "generate": Phase({"rollout": ("weights", "kv_cache")}),
    "sync": Phase({"train": ("model",)}, fills={"rollout": ("weights",)}),
    "train": Phase({"train": ("model", "optimizer")}),
    "logprobs": Phase({"train": ("model",)}),
    "ref_logprobs": Phase({"train": ("model",)}),
    "checkpoint": Phase({"train": ("model", "optimizer")}),
    "export": Phase({"train": ("model",)}),
    "teacher": Phase({"teacher": ("model",)}),
    "teacher_head": Phase({"train": ("model",), "teacher": ("model",)}),
    "teach": Phase({"train": ("model",)}),
    "sample": Phase({"sampler": ("weights", "kv_cache")}),
    "score": Phase({"orm": ("model",)}),
    "score_prm": Phase({"prm": ("model",)}),
}
"""The phases of the algorithms here; an algorithm with others has a table `phases` of its own. A part that a role does
not have takes nothing: an orm of functions has no model."""


def scoring(role: str) -> dict[str, Phase]:
    """The phase in which a prm or orm role works, by its name: one each, so that those that share a device take turns.

    >>> scoring("orm"), scoring("orm_judge")["score_orm_judge"].roles
    ({'score': Phase(needs={'orm': ('model',)}, fills={})}, ('orm_judge',))
    """
    return {"score" if role == "orm" else f"score_{role}": Phase({role: ("model",)})}


class At(Enum):
    """Where a part is."""

    DEVICE = "device"
    AWAY = "away"
    DROPPED = "dropped"
    """Neither memory nor content."""
    HOLLOW = "hollow"
    """Memory on the device, and nothing in it yet."""


@dataclass(frozen=True)
class Move:
    """One call on one role."""

    role: str
    to: Literal["away", "back"]
    parts: Parts


@dataclass(eq=False)
class Ticket:
    """A phase that waits for its turn, or has it."""

    name: str
    phase: Phase
    groups: frozenset[int]
    """The shared groups its roles are in."""
    has_begun: bool = False
    is_settled: bool = False
    """Whether everything it needs is awake."""


class Turns:
    """Who holds the devices of each colocate group: pure state.

    Phases of roles in one group exclude each other, in the order in which they asked; a phase may be joined by others
    of its own name. A role that shares with nobody neither waits nor moves.

    What must never happen: a phase that needs a part begins while that part's content is gone. Weights that a deep
    sleep has dropped stay dropped until a phase that fills them has ended well; memory that is mapped again does not
    bring them back. `moves` raises TurnError instead.

    >>> turns = Turns([("train", "rollout")], {"rollout": Tenant({"weights": Rest.LOST}), "train": Tenant({})})
    >>> train = turns.ask("train", PHASES["train"])
    >>> turns.begin(train)
    >>> turns.moves(train)
    [Move(role='rollout', to='away', parts=('weights',))]
    """

    def __init__(self, groups: Iterable[Sequence[str]] = (), tenants: Mapping[str, Tenant] | None = None) -> None:
        self._groups = [tuple(group) for group in groups if len(group) > 1]
        self._group_of = {role: index for index, group in enumerate(self._groups) for role in group}
        shared = [{role for role in group if role in (tenants or {})} for group in self._groups]
        sharing = set().union(*(roles for roles in shared if len(roles) > 1)) if shared else set()
        self._tenants = {role: tenant for role, tenant in (tenants or {}).items() if role in sharing}
        self._at = {(role, part): At.DEVICE for role, tenant in self._tenants.items() for part in tenant.parts}
        self._tickets: list[Ticket] = []
        """In the order in which they asked."""

    # ----- whose turn -----

    def ask(self, name: str, phase: Phase) -> Ticket:
        """Stand in line."""
        ticket = Ticket(name, phase, self._groups_of(phase))
        self._tickets.append(ticket)
        return ticket

    def may_begin(self, ticket: Ticket) -> bool:
        """Whether nobody before it is in the way."""
        for other in self._tickets:
            if other is ticket:
                return True
            joins = other.name == ticket.name and other.is_settled
            if other.groups & ticket.groups and not joins:
                return False
        raise ValueError(f"the ticket of phase {ticket.name!r} was given back")

    def begin(self, ticket: Ticket) -> None:
        """Take the turn; its moves come next, and then `settle`."""
        if not self.may_begin(ticket):
            raise TurnError(f"phase {ticket.name} cannot begin: {', '.join(self.in_the_way(ticket))} comes first")
        ticket.has_begun = True

    def settle(self, ticket: Ticket) -> None:
        """Everything the phase needs is awake: others of its name may join."""
        ticket.is_settled = True

    def leave(self, ticket: Ticket, *, succeeded: bool) -> None:
        """Give the turn (or the place in the line) back."""
        self._tickets.remove(ticket)
        if succeeded and ticket.is_settled:
            self.filled(ticket.phase)

    def filled(self, phase: Phase) -> None:
        """The parts that a phase fills are whole."""
        for role, parts in phase.fills.items():
            for part in parts:
                if self._at.get((role, part)) is At.HOLLOW:
                    self._at[role, part] = At.DEVICE

    def in_the_way(self, ticket: Ticket) -> list[str]:
        """Names of the phases that share a group with this one and come before it."""
        before = self._tickets[: self._tickets.index(ticket)]
        return [other.name for other in before if other.groups & ticket.groups]

    def holders(self, phase: Phase) -> list[Ticket]:
        """Who has a turn now on the devices of a phase."""
        groups = self._groups_of(phase)
        return [ticket for ticket in self._tickets if ticket.is_settled and ticket.groups & groups]

    def _groups_of(self, phase: Phase) -> frozenset[int]:
        return frozenset(self._group_of[role] for role in phase.roles if role in self._group_of)

    # ----- what is where -----

    def shares(self, role: str) -> bool:
        """Whether a role has memory of a device in its turn alone, for something of those that share it moves."""
        here = (role, *self.beside(role)) if role in self._tenants else ()
        tenants = [self._tenants[other] for other in here if other in self._tenants]
        return any(rest is not Rest.STAYS for tenant in tenants for rest in tenant.parts.values())

    def beside(self, role: str) -> list[str]:
        """The others who share the devices of a role."""
        group = self._groups[self._group_of[role]] if role in self._group_of else ()
        return [other for other in group if other != role]

    def started_anew(self, role: str) -> None:
        """A role was started again as a whole: all its parts are on the device, with what they hold at first."""
        for part in self._tenants[role].parts if role in self._tenants else ():
            self._at[role, part] = At.DEVICE

    def at(self, role: str, part: str) -> At:
        """Where a part is; parts of roles that share with nobody are on their device."""
        return self._at.get((role, part), At.DEVICE)

    def moves(self, ticket: Ticket) -> list[Move]:
        """What has to move before the phase of a ticket; see `moves_of`."""
        return self.moves_of(ticket.name, ticket.phase)

    def moves_of(self, name: str, phase: Phase) -> list[Move]:
        """What has to move before a phase: first away, then back.

        Other roles of the group make room with all they can. The phase's own roles do so, with what it does not use,
        where something has to wake. A phase that uses no memory moves nothing. Raises TurnError where the phase needs
        what is gone.
        """
        self._refuse_what_is_gone(name, phase)
        using = [role for role in phase.roles if role in self._tenants and phase.wakes(role)]
        groups = {self._group_of[role] for role in using}
        back = {role: self._asleep(role, phase.wakes(role)) for role in using}
        away = {}
        for role in (role for index in sorted(groups) for role in self._groups[index] if role in self._tenants):
            if role in using and not any(back.values()):
                continue
            parts = self._leaving(role, keep=phase.wakes(role) if role in using else ())
            if not parts:
                continue
            away[role] = parts
            if role in using:
                back[role] = tuple(part for part in phase.wakes(role) if part in parts or part in back[role])
        moves = [Move(role, "away", parts) for role, parts in away.items()]
        return moves + [Move(role, "back", parts) for role, parts in back.items() if parts]

    def first_rest(self, role: str) -> list[Move]:
        """What a role that has just started moves away, so that those that share its devices can start as well."""
        if role not in self._tenants:
            return []
        parts = self._leaving(role, keep=())
        return [Move(role, "away", parts)] if parts else []

    def moved(self, move: Move) -> None:
        """A move has been made."""
        for part in move.parts:
            key = (move.role, part)
            if move.to == "back":
                self._at[key] = At.HOLLOW if self._at[key] is At.DROPPED else At.DEVICE
            elif self._tenants[move.role].parts[part] is Rest.LOST:
                self._at[key] = At.DROPPED
            else:
                self._at[key] = At.AWAY

    def _asleep(self, role: str, parts: Parts) -> Parts:
        return tuple(part for part in parts if self.at(role, part) in (At.AWAY, At.DROPPED))

    def _leaving(self, role: str, keep: Parts) -> Parts:
        """The parts that make room, of those that are on the device."""
        tenant = self._tenants[role]
        movable = [part for part, rest in tenant.parts.items() if rest is not Rest.STAYS]
        leaving = [part for part in movable if self.at(role, part) in (At.DEVICE, At.HOLLOW)]
        unused = [part for part in leaving if part not in keep]
        return tuple(leaving if unused and tenant.is_whole else unused)

    def _refuse_what_is_gone(self, name: str, phase: Phase) -> None:
        for role, parts in phase.needs.items():
            for part in parts:
                if self.at(role, part) in (At.DROPPED, At.HOLLOW):
                    raise TurnError(
                        f"phase {name} needs the {part} of {role}, which were dropped to make room and not "
                        "brought back since: sync before it (await self.sync()), or set placement.sleep_level=1, which "
                        "keeps them in host memory"
                    )


def turns_of(groups: Iterable[Sequence[str]], kinds: Mapping[str, type[Role]], placement: PlacementConfig) -> Turns:
    """The turns of a run: its groups, the interfaces of its roles, and what the config asks them to give away."""
    tenants = {role: tenant(kind, placement) for role, kind in kinds.items()}
    return Turns(groups, {role: found for role, found in tenants.items() if found is not None})


class Mover(Protocol):
    """How the parts of one role are moved; see `rolegraph.movers`."""

    async def away(self, parts: Parts) -> None:
        """Free their memory."""

    async def back(self, parts: Parts) -> None:
        """Give them their memory, and what they held where that was kept."""


Moving = Callable[[tuple[str, ...]], AbstractContextManager[None]]
"""Told the roles that move, gives what surrounds the moves (a timer)."""


class TurnTaker:
    """Takes turns for the phases of an algorithm, and moves what has to move.

    Several tasks may take turns at once; those of one colocate group wait for each other, others do not. Nothing is
    shared between event loops.
    """

    def __init__(self, turns: Turns | None = None, movers: Mapping[str, Mover] | None = None) -> None:
        """`movers` by role, of those that `started` will not tell of."""
        self.turns = turns or Turns()
        self._movers = dict(movers or {})
        self._gates: dict[Ticket, asyncio.Future[None]] = {}
        self._held: dict[Ticket, asyncio.Task[object] | None] = {}

    async def started(self, role: str, mover: Mover) -> None:
        """A role is ready: from now on it can be moved, and it makes room at once."""
        self._movers[role] = mover
        for move in self.turns.first_rest(role):
            await self._make(move)

    @asynccontextmanager
    async def take(self, name: str, phase: Phase, moving: Moving | None = None) -> AsyncIterator[None]:
        """Wait for the turn, wake what `phase` needs, and keep others out until the block ends.

        Raises TurnError where the phase needs weights that are gone, and where this task holds a turn already that
        excludes this one (it would wait for itself).
        """
        ticket = self.turns.ask(name, phase)
        succeeded = False
        try:
            self._refuse_waiting_for_itself(ticket)
            self._gates[ticket] = asyncio.get_running_loop().create_future()
            self._admit()
            await self._gates[ticket]
            if moves := self.turns.moves(ticket):
                roles = tuple(dict.fromkeys(move.role for move in moves))
                with moving(roles) if moving is not None else nullcontext():
                    for move in moves:
                        await self._make(move)
            self.turns.settle(ticket)
            self._held[ticket] = asyncio.current_task()
            self._admit()
            yield
            succeeded = True
        finally:
            self._gates.pop(ticket, None)
            self._held.pop(ticket, None)
            self.turns.leave(ticket, succeeded=succeeded)
            self._admit()

    @asynccontextmanager
    async def interlude(self, name: str, phase: Phase) -> AsyncIterator[None]:
        """Another phase in the middle of a turn, whose work rests meanwhile; what moves is moved back.

        Where it fails, what has moved stays where it is: the turn cannot go on.
        """
        holders = self.turns.holders(phase)
        for move in self.turns.moves_of(name, phase):
            await self._make(move)
        yield
        self.turns.filled(phase)
        for ticket in holders:
            for move in self.turns.moves(ticket):
                await self._make(move)

    async def make_room(self, role: str) -> None:
        """Move away all that the others on the devices of a role can, while nobody has a turn there."""
        for other in self.turns.beside(role):
            for move in self.turns.first_rest(other):
                await self._make(move)

    async def _make(self, move: Move) -> None:
        mover = self._movers[move.role]
        await (mover.away(move.parts) if move.to == "away" else mover.back(move.parts))
        self.turns.moved(move)

    def _admit(self) -> None:
        for ticket, gate in self._gates.items():
            if not ticket.has_begun and self.turns.may_begin(ticket):
                self.turns.begin(ticket)
                if not gate.done():
                    gate.set_result(None)

    def _refuse_waiting_for_itself(self, ticket: Ticket) -> None:
        task = asyncio.current_task()
        for held, holder in self._held.items():
            if holder is task and held.groups & ticket.groups:
                raise TurnError(
                    f"phase {ticket.name} inside phase {held.name} would wait for itself: their roles share devices. "
                    f"End the block of {held.name} first"
                )
