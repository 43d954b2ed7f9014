"""How roles that share a GPU divide its memory.

A role *steps aside* when it gives its memory up while another role of its group has its turn; the others stay. At any
moment a device holds every role that stays and, where some step aside, one of those; teachers have their turn together,
so of them all that step aside. So each role of a group of which `s` stay and `a` step aside, `t` of these teachers, may
have 1 / (s + max(t, min(a, 1))) of the device: everything where all step aside, and where a role is alone; a half where
one of two stays, whichever of the two it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolegraph.placement.types import PlacementConfig
from rolegraph.role import is_teacher


def steps_aside(role: str, placement: PlacementConfig) -> bool:
    """Whether a role frees the devices it shares while it is another role's turn.

    A trainer that keeps either its weights or its optimizer on the device stays: what it keeps does not follow from
    the plan, so no other role can count on the rest.
    """

    def on(key: str) -> bool:
        return bool(getattr(placement, key, False))

    if role == "train":
        return on("offload_model") and on("offload_optimizer")
    if is_teacher(role):
        return on("offload_teacher_model")
    return role in ("rollout", "sampler") and on("sleep_level")


def share_of(roles: Sequence[str], placement: PlacementConfig) -> float:
    """The part of a device's memory that each of the roles on it may have."""
    aside = [role for role in roles if steps_aside(role, placement)]
    at_once = max(sum(map(is_teacher, aside)), min(len(aside), 1))
    return 1 / max(len(roles) - len(aside) + at_once, 1)
