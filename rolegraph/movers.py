"""How the parts of each kind of role are moved off the devices it shares, and back: calls on its handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rolegraph.errors import RoleError, TurnError
from rolegraph.group import group_of, is_deserted
from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, SamplerRole, TeacherRole, TrainRole
from rolegraph.placement import PlacementConfig
from rolegraph.role import Role
from rolegraph.turns import Mover, Parts


@dataclass(frozen=True)
class TrainMover:
    """Moves a trainer's parts."""

    train: TrainRole

    async def away(self, parts: Parts) -> None:
        """Offload them."""
        await self.train.offload(model="model" in parts, optimizer="optimizer" in parts)

    async def back(self, parts: Parts) -> None:
        """Load them back."""
        await self.train.onload(model="model" in parts, optimizer="optimizer" in parts)


@dataclass(frozen=True)
class ModelMover:
    """Moves the model of a teacher or a reward model. A replica that dies meanwhile is left out."""

    role: TeacherRole | PRMRole | ORMRole

    async def away(self, parts: Parts) -> None:
        """Offload it."""
        await _living(self.role, lambda: self.role.offload())

    async def back(self, parts: Parts) -> None:
        """Load it back."""
        await _living(self.role, lambda: self.role.onload())


@dataclass(frozen=True)
class EngineMover:
    """Moves an engine's parts: all away together, back one by one. A replica that dies meanwhile is left out."""

    engine: RolloutRole | SamplerRole
    sleep_level: int

    async def away(self, parts: Parts) -> None:
        """Put the engines to sleep, `parts` being all that is awake."""
        await _living(self.engine, lambda: self.engine.sleep(self.sleep_level))

    async def back(self, parts: Parts) -> None:
        """Wake these parts."""
        await _living(self.engine, lambda: self.engine.wake_up(parts))


async def _living(role: Role, call: Callable[[], Awaitable[object]]) -> None:
    """Make a call, and once more where it found a replica dead: that one is not asked again.

    Those that have done it do it no second time. Any other fault is the caller's: asked again, a role that found no
    memory half way may say that nothing is left to do.
    """
    group = group_of(role)
    if is_deserted(role):
        return  # who comes back starts with all its parts on the device, in a turn of the role
    before = group.reached()  # those that join, too
    try:
        await call()
    except RoleError:
        if not group.are_replicas or group.reached() == before:
            raise
        if not is_deserted(role):
            await call()


def mover(handle: Role, placement: PlacementConfig) -> Mover:
    """What moves the parts of the role behind this handle."""
    if isinstance(handle, TrainRole):
        return TrainMover(handle)
    if isinstance(handle, RolloutRole | SamplerRole):
        return EngineMover(handle, placement.sleep_level)
    if isinstance(handle, TeacherRole | PRMRole | ORMRole):
        return ModelMover(handle)
    raise TurnError(f"a {type(handle).__name__} has no parts that move")
