"""What is on a device in each phase of a step: the parts of each role's memory, and which of them are put aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolegraph.config.schema import RunConfig, Spec
from rolegraph.placement.memory import Copy, Engine, Holder, Trainer
from rolegraph.placement.shares import moves
from rolegraph.role import is_scorer, is_teacher
from rolegraph.turns import PHASES, Phase, scoring

BEFORE_SCORING = ("generate", "sample")
AFTER_SCORING = ("logprobs", "ref_logprobs", "teacher", "teach", "train", "sync")
"""The phases of a step that take memory, in their order; each prm or orm role has one of its own between them."""


@dataclass(frozen=True)
class Use:
    """Bytes of one part of one role on a device."""

    role: str
    part: str
    bytes: int


@dataclass(frozen=True)
class PhaseNeed:
    """What is on a device during one phase."""

    name: str
    uses: tuple[Use, ...]

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(use.bytes for use in self.uses)


@dataclass(frozen=True)
class DeviceNeed:
    """What the devices of one colocate group hold, or the machines of a run on CPUs."""

    roles: tuple[str, ...]
    where: str
    """For people: `each of 8 GPUs`."""
    nodes: tuple[str, ...]
    capacity: int | None
    """Bytes of the smallest of these devices; null where nothing told."""
    usable: int | None
    """Of these, what roles may take."""
    phases: tuple[PhaseNeed, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """All devices of a plan, and the roles that could not be estimated, with the reason."""

    needs: tuple[DeviceNeed, ...]
    unknown: Mapping[str, str]


def phases_of(
    run: RunConfig, ranks: Mapping[str, int], holders: Mapping[str, Holder], *, shared: bool
) -> tuple[PhaseNeed, ...]:
    """What is on a device with so many ranks of each role, in every phase of a step that one of them works in."""
    found, table = [], table_of(run)
    for name in _names(run, ranks, table):
        phase = table.get(name)
        uses = []
        for role, count in ranks.items():
            works = phase is None or role in phase.roles
            for part, size in _parts(holders[role], name if works else "").items():
                kind = kind_of(role, holders[role], part)
                here = works and (phase is None or kind == "working" or kind in woken(phase, role))
                if here or not (shared and _aside(run, role, kind, works=works)):
                    uses.append(Use(role, part, size * count))
        found.append(PhaseNeed(name, tuple(uses)))
    return tuple(found)


def table_of(run: RunConfig) -> Mapping[str, Phase]:
    """The phases of a step; all teachers of the run, whatever their names, work in one, scorers each in its own."""
    teachers = Phase({role: ("model",) for role in run.started if is_teacher(role)})
    return {**PHASES, "teacher": teachers, **_scoring(run)}


def _scoring(run: RunConfig) -> dict[str, Phase]:
    return {name: phase for role in run.started if is_scorer(role) for name, phase in scoring(role).items()}


def woken(phase: Phase, role: str) -> tuple[str, ...]:
    """The kinds of parts that a phase has on the device; gradients come with the step that needs them."""
    parts = phase.wakes(role)
    return (*parts, "gradients") if "optimizer" in parts else parts


def _names(run: RunConfig, roles: Mapping[str, int], table: Mapping[str, Phase]) -> list[str]:
    options = run.algorithm.config
    skipped = {
        "logprobs": not getattr(options, "needs_logprobs", False),
        "ref_logprobs": not getattr(options, "needs_reference", False),
        "teach": not bound_roles(run),
    }
    order = (*BEFORE_SCORING, *_scoring(run), *AFTER_SCORING)
    possible = [name for name in order if set(table[name].roles) <= set(run.roles) and not skipped.get(name)]
    return [name for name in possible if set(table[name].roles) & set(roles)] or ["running"]


def _parts(holder: Holder, phase: str) -> dict[str, int]:
    """Bytes by part in a phase that the role works in, or in others for an empty name."""
    if isinstance(holder, Trainer):
        stage = holder.largest_stage()
        found = holder.state(stage)
        if phase in ("train", "running", "logprobs", "ref_logprobs", "teach"):
            found["activations"] = holder.activations(stage, backward=phase in ("train", "running"))
        return found
    parts = holder.parts()
    if isinstance(holder, Copy) and not phase:
        del parts["activations"]
    return parts


def kind_of(role: str, holder: Holder, part: str) -> str:
    """The part by the name under which turns move it; `working` is there only while the role works."""
    if part == "activations":
        return "working"
    if is_teacher(role) or is_scorer(role):  # whatever runs it, its memory moves as one
        return "model"
    if isinstance(holder, Engine):
        return "weights" if part == "weights" else "kv_cache"
    return part if part in ("optimizer", "gradients") else "model"


def _aside(run: RunConfig, role: str, kind: str, *, works: bool) -> bool:
    """Whether a part leaves a shared device while it is not needed; `works`: its role does, without it."""
    placement = run.placement
    if kind == "gradients":  # dropped with whatever leaves
        return moves(role, "optimizer", placement) or (moves(role, "model", placement) and not works)
    return moves(role, kind, placement)


def bound_roles(run: RunConfig) -> list[Spec]:
    """Roles that the trainer's actors play as well: the policy as its own teacher."""
    return [spec for spec in run.roles.values() if getattr(spec.config, "binds", None) == "train"]
