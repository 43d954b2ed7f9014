"""Who makes room on a shared device, and how the roles of a group divide its memory.

A role *steps aside* when it gives its memory up while another role of its group has its turn; the others stay. At any
moment a device holds every role that stays and, where some step aside, one of those; teachers have their turn together,
so of them all that step aside. So each role of a group of which `s` stay and `a` step aside, `t` of these teachers, may
have 1 / (s + max(t, min(a, 1))) of the device: everything where all step aside, and where a role is alone; a half where
one of two stays, whichever of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolegraph.placement.types import PlacementConfig
from rolegraph.role import family, is_teacher

ENGINE = {"weights": "sleep_level", "kv_cache": "sleep_level"}
REWARD_MODEL = {"model": "offload_reward_model"}
MOVABLE: Mapping[str, Mapping[str, str]] = {
    "train": {"model": "offload_model", "optimizer": "offload_optimizer"},
    "rollout": ENGINE,
    "sampler": ENGINE,
    "teacher": {"model": "offload_teacher_model"},
    "prm": REWARD_MODEL,
    "orm": REWARD_MODEL,
}
"""The parts of a role's memory that move by themselves, by the role's family, and the key of `placement` that says
whether they do."""


def moves(role: str, part: str, placement: PlacementConfig) -> bool:
    """Whether a part of a role's memory makes room while another role has its turn."""
    key = MOVABLE.get(family(role), {}).get(part)
    return key is not None and bool(getattr(placement, key, False))


def steps_aside(role: str, placement: PlacementConfig) -> bool:
    """Whether a role frees the devices it shares while it is another role's turn.

    A trainer that keeps either its weights or its optimizer on the device stays: what it keeps does not follow from
    the plan, so no other role can count on the rest.
    """
    parts = MOVABLE.get(family(role), {})
    return bool(parts) and all(moves(role, part, placement) for part in parts)


def share_of(roles: Sequence[str], placement: PlacementConfig) -> float:
    """The part of a device's memory that each of the roles on it may have."""
    aside = [role for role in roles if steps_aside(role, placement)]
    at_once = max(sum(map(is_teacher, aside)), min(len(aside), 1))
    return 1 / max(len(roles) - len(aside) + at_once, 1)
