"""Evaluation alone: eval sets answered by a model that nobody trains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import EvaluationConfig
from rolegraph.algorithms.hooks import Step
from rolegraph.interfaces import ORMRole, PRMRole, RolloutRole, TrainRole
from rolegraph.results import write_json
from rolegraph.role import Role

RESULTS = "results.json"


class Evaluation(Algorithm):
    """The beginning of a run without steps: what evaluates runs does its work then.

    `train` computes the losses of sets that ask for them; reward roles score the sets without functions of their own.
    """

    Config: ClassVar[type[EvaluationConfig]] = EvaluationConfig
    config: EvaluationConfig
    rollout: RolloutRole | None
    train: TrainRole | None
    orm: ORMRole | None
    prm: PRMRole | None
    more_roles: ClassVar[Mapping[str, type[Role]]] = MappingProxyType({"orm_": ORMRole})

    async def run(self) -> None:
        """Evaluate every set, and write the numbers to `results.json`: by set, by metric."""
        telemetry = self.job.telemetry
        self.at = Step("eval", 0, 0)
        for hook in self.job.hooks:
            await hook.begun(self, self.at)
        sets: dict[str, dict[str, float | None]] = {}
        for name, value in telemetry.logged("eval/").get(0, {}).items():
            _, of, metric = name.split("/", 2)
            sets.setdefault(of, {})[metric] = value
        what = self.config.model or self.job.config.model.path
        write_json(telemetry.run_dir / RESULTS, {"model": what, "sets": sets})
