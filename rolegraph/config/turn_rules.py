"""Rules on what roles do while others have their turn on a shared device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from rolegraph.config.schema import RunConfig
from rolegraph.placement.shares import MOVABLE
from rolegraph.role import family


def algorithm_roles(target: str) -> tuple[dict[str, tuple[type, bool]], dict[str, type]]:
    """Roles an algorithm class declares by its annotations: their interface, and whether it can do without.

    And how the names of further roles begin that it takes, with their interface.
    """
    from rolegraph.algorithms.base import declared_roles

    algorithm = _class_of(target)
    return dict(declared_roles(algorithm)), dict(getattr(algorithm, "more_roles", {}))


def says(target: str, attribute: str) -> bool:
    """Whether an algorithm class has this attribute and it is true; one that cannot be imported has not."""
    try:
        return bool(getattr(_class_of(target), attribute, False))
    except Exception:  # another rule says so
        return False


def _class_of(target: str) -> type:
    module, _, name = target.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def tenants_beside(run: RunConfig, role: str) -> set[str]:
    """Roles of the run that compute on the same devices, `role` aside."""
    group = next((set(group) for group in run.placement.sharing(run.roles) if role in group), set[str]())
    others = (group & run.started.keys()) - {role}
    return {name for name in others if not takes_no_device(run, name)}


def takes_no_device(run: RunConfig, role: str) -> bool:
    """Whether a role computes in moments of a core, or elsewhere altogether (reward functions, services)."""
    return bool(getattr(run.roles[role].config, "never_on_gpu", False))


def turns_make_room(run: RunConfig) -> Iterator[str]:
    """What is asked of roles that share devices is asked of some that do, and can be undone."""
    from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, SamplerRole, TeacherRole, TrainRole

    try:
        declared, more = algorithm_roles(run.algorithm.target)
    except Exception:  # another rule says so
        return
    kinds = {role: kind for role, (kind, _) in declared.items() if role in run.started}
    for prefix, interface in more.items():
        kinds |= {role: interface for role in run.started if role.startswith(prefix) and role not in kinds}

    def sharing_devices(*interfaces: type) -> list[str]:
        mine = [role for role, kind in kinds.items() if issubclass(kind, interfaces) and not takes_no_device(run, role)]
        return [role for role in mine if tenants_beside(run, role)]

    trainers, engines = sharing_devices(TrainRole), sharing_devices(RolloutRole, SamplerRole)
    settings: dict[str, tuple[object, list[str], str]] = {
        "offload_model": (run.placement.offload_model, trainers, "role that trains"),
        "offload_optimizer": (run.placement.offload_optimizer, trainers, "role that trains"),
        "offload_teacher_model": (run.placement.offload_teacher_model, sharing_devices(TeacherRole), "teacher"),
        "offload_reward_model": (run.placement.offload_reward_model, sharing_devices(PRMRole, ORMRole), "reward model"),
        "sleep_level": (run.placement.sleep_level, engines, "engine"),
    }
    whoever_can = run.tree.get("placement", {}).get("colocate_groups") == "all"
    for key, (value, sharing, kind) in settings.items():
        if value and not sharing and not whoever_can:
            yield (
                f"placement.{key}={str(value).lower()} has no effect: no {kind} shares its devices with another role "
                "that computes there; remove it, or name them in placement.colocate_groups"
            )
    if run.placement.sleep_level:
        for role in engines:
            yield from _sleeps(run, role, is_synced=role == "rollout" and "train" in kinds)
    for role in sharing_devices(PRMRole, ORMRole) if run.placement.offload_reward_model else []:
        if getattr(run.roles[role].config, "enable_sleep_mode", None) is False:
            yield (
                f"{role}.enable_sleep_mode=false contradicts placement.offload_reward_model=true: remove it, or set "
                "placement.offload_reward_model=false"
            )


def _sleeps(run: RunConfig, role: str, *, is_synced: bool) -> Iterator[str]:
    level = run.placement.sleep_level
    if level == 2 and not is_synced:
        yield (
            f"placement.sleep_level=2 drops the weights of {role}, and no weight sync from train brings them back: set "
            "it to 1"
        )
    if getattr(run.roles[role].config, "enable_sleep_mode", None) is False:
        yield (
            f"{role}.enable_sleep_mode=false contradicts placement.sleep_level={level}: remove it, or set "
            "placement.sleep_level=0"
        )


def needs_sleep_mode(run: RunConfig, role: str) -> bool:
    """Whether an engine has to be started so that it can be put to sleep."""
    keys = set(MOVABLE.get(family(role), {}).values())
    return any(getattr(run.placement, key) for key in keys) and bool(tenants_beside(run, role))
