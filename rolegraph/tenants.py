"""What of each role takes memory of a device, and what becomes of it while others have their turn there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, SamplerRole, TeacherRole, TrainRole
from rolegraph.placement import PlacementConfig
from rolegraph.placement.shares import MOVABLE, moves
from rolegraph.role import Role

FAMILIES: tuple[tuple[type[Role], str], ...] = (
    (TrainRole, "train"),
    (RolloutRole, "rollout"),
    (SamplerRole, "sampler"),
    (TeacherRole, "teacher"),
    (PRMRole, "prm"),
    (ORMRole, "orm"),
)
"""By what `placement.shares` knows each interface, whatever the name of the role."""


class Rest(Enum):
    """What becomes of a part while others need its memory."""

    STAYS = "stays on the device"
    HOST = "moves to host memory and back"
    LOST = "is freed with what it holds, which somebody has to bring back"
    EMPTY = "is freed, and begins anew (a cache)"


@dataclass(frozen=True)
class Tenant:
    """A role that takes memory of a shared device."""

    parts: Mapping[str, Rest]
    is_whole: bool = False
    """All its parts fall asleep together, as those of an engine do; they wake one by one all the same."""


def tenant(kind: type[Role], placement: PlacementConfig) -> Tenant | None:
    """How a role of this interface makes room; null for one that takes no memory of a device."""
    name = next((name for interface, name in FAMILIES if issubclass(kind, interface)), None)
    if name is None:
        return None
    away = {"kv_cache": Rest.EMPTY, "weights": Rest.LOST if placement.sleep_level == 2 else Rest.HOST}
    parts = {part: away.get(part, Rest.HOST) if moves(name, part, placement) else Rest.STAYS for part in MOVABLE[name]}
    return Tenant(parts, is_whole="kv_cache" in parts)
