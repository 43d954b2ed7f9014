"""What every driver program has: a config, the run it is part of, and handles on the roles it names."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rolegraph.algorithms.hooks import Step
from rolegraph.batch import Batch
from rolegraph.checkpoints.state import State
from rolegraph.errors import TurnError
from rolegraph.interfaces import Metrics, ORMRole
from rolegraph.role import EVAL_ROLE, Role
from rolegraph.turns import PHASES, Phase

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.run import Run


class Algorithm:
    """A driver program over typed handles.

    Its class annotations say which roles it needs (`orm: ORMRole`) or takes if they are there (`orm: ORMRole | None`);
    they are handles, or None, by the time `run` is called::

        class Greet(Algorithm):
            Config = GreetConfig
            config: GreetConfig
            rollout: RolloutRole

            async def run(self) -> None:
                async with self.turn("generate"):
                    print(len(await self.rollout.generate(self.job.dataset.rows, SamplingParams())))
    """

    Config: ClassVar[type[Any]]
    """The dataclass of the algorithm's config."""
    phases: Mapping[str, Phase] = PHASES
    """What `turn` knows by name; an algorithm with phases of its own has `phases = {**PHASES, "judge": Phase(...)}`."""
    more_roles: ClassVar[Mapping[str, type[Role]]] = MappingProxyType({})
    """Roles that a config may add, by how their names begin, beside those of the annotations."""
    can_resume: ClassVar[bool] = False
    """Whether `begin` goes on in the folder of an earlier run where the config says `resume`."""
    can_save: ClassVar[bool] = False
    """Whether `state` says enough to go on from a checkpoint. A class that overrides `run` and not `state` is taken to
    have lost it."""
    config: Any

    def __init__(self, config: Any, run: Run) -> None:
        self.config = config
        self.job = run
        """The run: its config, dataset, telemetry, weight sync, and whose turn it is."""
        self.at = Step("", 0, 0)
        """The step behind which the program is."""
        self.resumed: Step | None = None
        """Where a checkpoint was taken that the program goes on from, until the stage of then begins."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "run" in cls.__dict__ and not {"state", "can_save"} & cls.__dict__.keys():
            cls.can_save = False

    @classmethod
    def roles(cls) -> dict[str, tuple[type[Role], bool]]:
        """The roles of the class annotations by name: their interface, and whether the algorithm can do without."""
        return declared_roles(cls)

    @classmethod
    def interface_of(cls, role: str) -> type[Role]:
        """What the algorithm talks to under this name; raises KeyError for a role it does not take."""
        declared = cls.roles()
        if role in declared:
            return declared[role][0]
        for prefix, kind in {**cls.more_roles, EVAL_ROLE: ORMRole}.items():
            if role.startswith(prefix):
                return kind
        raise KeyError(role)

    @classmethod
    def begin(cls, config: RunConfig, run_dir: Path) -> str | None:
        """Look at the run's folder, which need not be there, before anything starts.

        A sentence that is returned is told, and ends the run there, as a success. By itself an algorithm takes no
        folder that holds a run, unless `resume` says to go on from a checkpoint: ConfigError.
        """
        from rolegraph.checkpoints.resume import begin

        return begin(config, run_dir)

    async def run(self) -> None:
        """The program, from the first step to the last."""
        raise NotImplementedError

    def state(self) -> State:
        """What later steps depend on, beside where the program is (`at`) and what the roles save.

        Asked for between two steps. `run` has to go on from it: it takes the steps behind `at.number` of the stage
        that has begun, and leaves out what `is_behind` says is done.
        """
        return State()

    def restore(self, at: Step, state: State) -> None:
        """Go on from a checkpoint that was taken at `at`; called before `run`."""
        self.at = self.resumed = at

    def is_behind(self, stage: str) -> bool:
        """Whether the run goes on from a checkpoint of a stage that comes after this one, so that it is done."""
        return self.resumed is not None and self.resumed.stage != stage

    async def begin_stage(self, name: str, steps: int, *, is_main: bool = True) -> None:
        """A part of the run begins, of so many optimizer steps: the algorithm's own, or what comes before it.

        `at` is its beginning, or where a checkpoint was taken within it.
        """
        resumed, self.resumed = self.resumed, None
        number = resumed.number if resumed is not None and resumed.stage == name else 0
        self.job.telemetry.stage(name, steps, number)
        self.at = Step(name, number, steps, is_main)
        for hook in self.job.hooks:
            await hook.begun(self, self.at)

    async def end_step(self, metrics: Metrics, batch: Batch | None = None) -> None:
        """The next optimizer step of the stage was taken, on `batch`: it goes into the log, hooks do what is due."""
        at = replace(self.at, number=self.at.number + 1, metrics=metrics, batch=batch)
        for hook in self.job.hooks:
            metrics = metrics | await hook.stepped(self, at)
        self.job.telemetry.step(at.number, metrics)
        self.at = replace(at, metrics=metrics, batch=None)
        for hook in self.job.hooks:
            await hook.logged(self, self.at)

    async def sync(self) -> int:
        """Bring the trainer's weights into the engines; returns how often that was done, their version."""
        if self.job.sync is None:
            return 0
        async with self.turn("sync"):
            await self.job.sync.sync()
        return self.job.sync.version

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """A phase of a step: `async with self.turn("generate"): ...`.

        It waits until the roles that share devices with those of the phase have ended their turns, puts to sleep what
        must make room, wakes what the phase needs, and times the block as `seconds/NAME` (what moves before it as
        `seconds/turns`). Every call that computes on a device belongs into one. Raises TurnError for a name that is
        not in `phases`, and where the phase needs weights that were dropped and not synced since.
        """
        if name not in self.phases:
            raise TurnError(f"{type(self).__name__} has no phase {name!r}; its phases are {', '.join(self.phases)}")
        phase, telemetry = self.phases[name], self.job.telemetry
        async with self.job.turns.take(name, phase, lambda roles: telemetry.phase("turns", *roles)):
            with telemetry.phase(name, *phase.roles):
                yield

    def steps(self, rows_per_step: float) -> int:
        """Optimizer steps of the run: `max_steps`, or as many as a pass over the dataset has."""
        wanted = self.job.config.max_steps
        return math.ceil(len(self.job.dataset) / rows_per_step) if wanted is None else wanted


def declared_roles(algorithm: type) -> dict[str, tuple[type[Role], bool]]:
    """The roles that a class's annotations name: their interface, and whether they may be absent (`ORMRole | None`)."""
    found: dict[str, tuple[type[Role], bool]] = {}
    for name, hint in typing.get_type_hints(algorithm).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for member in members:
            if isinstance(member, type) and issubclass(member, Role):
                found[name] = (member, types.NoneType in members)
    return found
