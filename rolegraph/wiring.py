"""What an algorithm is given for the roles of its config: models found, handles, teachers, and the way of weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.algorithms.hooks import Hook
from rolegraph.algorithms.scorers import Scorers
from rolegraph.algorithms.teachers import Teachers
from rolegraph.bad_steps import BadSteps
from rolegraph.checkpoints.hook import Checkpointer
from rolegraph.checkpoints.stopping import StopRequest
from rolegraph.config.eval_sets import completion_length, scorer_of
from rolegraph.config.schema import RunConfig
from rolegraph.data import Dataset
from rolegraph.errors import ConfigError, DataError
from rolegraph.evaluation.evaluator import EvalSet, Evaluator
from rolegraph.evaluation.hook import EvalHook
from rolegraph.graph import RoleGraph
from rolegraph.models import ModelConfig, ensure
from rolegraph.placement import Plan
from rolegraph.role import is_scorer, is_teacher
from rolegraph.weights import WeightSync

if TYPE_CHECKING:
    from rolegraph.run import Run


def import_target(target: str) -> Any:
    """The class or function that a checked `_target_` names."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def with_models(config: RunConfig, policy: str) -> RunConfig:
    """The config with a folder for every role's model: its own, made or fetched first, or the policy's.

    Raises ConfigError for a teacher or a sampler whose token ids mean something else than the policy's.
    """
    config = config.with_model_path(policy)
    for role, spec in config.roles.items():
        if isinstance(getattr(spec.config, "model", None), ModelConfig):
            config = config.with_role(role, model=ensure(spec.config.model))
    check_tokenizers(config, policy)
    return config


def check_tokenizers(config: RunConfig, policy: str) -> None:
    """Raises ConfigError, with the first token that differs, for a teacher or a sampler that reads ids otherwise."""
    from rolegraph.data.tokenizer import first_difference

    for role, spec in config.started.items():
        path = getattr(spec.config, "model", None)
        is_sampler = role == "sampler"
        if (
            (is_teacher(role) or is_sampler)
            and path not in (None, policy)
            and (found := first_difference(policy, path))
        ):
            raise ConfigError(
                f"{role}.model={path} has another tokenizer than the policy, whose token ids it is given: {found}"
                + (f". Name it as the run's own model: model.path={path}, {role}.model=null" if is_sampler else "")
            )


def handles_of(config: RunConfig, graph: RoleGraph) -> dict[str, Any]:
    """What the algorithm holds for each role: the handle of its group, or what stands for it in the driver."""
    handles: dict[str, Any] = {role: graph.groups[role].handle for role in config.started}
    for role, spec in config.roles.items():
        if role not in handles:
            handles[role] = import_target(spec.target)(spec.config, handles[spec.config.binds])
    return handles


def teachers_of(config: RunConfig, handles: Mapping[str, Any]) -> Teachers:
    """All teachers of the run; none where nothing is distilled."""
    roles = [role for role in handles if is_teacher(role)]
    as_asked = all(getattr(config.roles[role].config, "temperatures", False) for role in roles)
    return Teachers({role: handles[role] for role in roles}, None if as_asked else 1.0)


def scorers_of(config: RunConfig, handles: Mapping[str, Any]) -> Scorers:
    """All reward roles of the run, with what the algorithm's config says about their scores; none where it has none."""
    options = config.algorithm.config
    how = getattr(options, "prm_reward", None)
    return Scorers(
        {role: handle for role, handle in handles.items() if is_scorer(role)},
        weights=getattr(options, "score_weights", {}),
        reduce="min" if how in (None, "per_step") else how,
        left_out=frozenset({"prm"} if how == "per_step" else ()),
    )


def eval_hook(
    config: RunConfig,
    placed: Plan,
    run: Run,
    handles: Mapping[str, Any],
    sets: Mapping[str, Dataset],
    stop: StopRequest,
) -> EvalHook:
    """What evaluates the run; raises DataError for a set with fewer rows than ranks share."""
    found = []
    for name, dataset in sets.items():
        each = config.eval.sets[name]
        ranks = placed.roles["train"][0].mesh.dp if each.loss else 1
        if len(dataset) < ranks:
            raise DataError(
                f"eval.sets.{name} has {len(dataset)} rows for the {ranks} data-parallel ranks of train: give it more"
            )
        scorer = scorer_of(config, name) if each.samples else None
        found.append(
            EvalSet(
                name,
                each,
                dataset.rows,
                run.scorers if scorer is None else handles[scorer],
                completion_length(config, each) or 0,
            )
        )
    evaluator = Evaluator(found, run.telemetry.run_dir / "eval", use_ray=config.use_ray)
    return EvalHook(evaluator, config.eval.every, stop)


@dataclass(frozen=True)
class Hooks:
    """Who is told of steps, and what the run is about."""

    make: Callable[[], tuple[Hook, ...]]
    """New ones, in the order in which they are told: what counts and measures first, what saves that last."""
    about: Mapping[str, Any]
    """The fingerprints of models and data, by which a checkpoint knows its run."""
    stop: StopRequest
    """Whether a signal asks the run to end."""


def hooks_of(config: RunConfig, run_dir: Path, about: Mapping[str, Any], stack: AsyncExitStack) -> Hooks:
    """The hooks of a run that is about these models and data; `stack` gives signals back at its end."""
    saves = config.checkpoint.every is not None
    stop = StopRequest()
    stack.callback(stop.restore)

    def make() -> tuple[Hook, ...]:
        hooks: list[Hook] = [BadSteps(config.health.max_bad_steps, run_dir, use_ray=config.use_ray)]
        if saves:
            hooks.append(Checkpointer(config.checkpoint, run_dir, about, use_ray=config.use_ray, stop=stop))
        return tuple(hooks)

    return Hooks(make, about, stop)


def weight_sync(config: RunConfig, placed: Plan, graph: RoleGraph) -> WeightSync | None:
    """The way from `train` to `rollout`, by the devices both are on."""
    if "train" not in graph.groups or "rollout" not in graph.groups:
        return None
    drain = getattr(config.algorithm.config, "on_sync", None) == "drain"
    return WeightSync(
        graph.groups["train"].handle,
        [graph.groups["rollout"].handle],
        backend=backend_of(placed),
        drain=drain,
        adapter=bool(getattr(config.roles["rollout"].config, "enable_lora", False)),
    )


def backend_of(placed: Plan) -> str:
    """What carries the weights from the devices of `train` to those of `rollout`."""
    slots = [slot for role in ("train", "rollout") for slot in placed.roles[role]]
    if any(slot.device == "cpu" for slot in slots):
        return "gloo"
    if "rollout" not in placed.group_of("train"):
        return "nccl"
    # Two processes on one GPU hand over memory; NCCL refuses them, and an engine that spans more GPUs than the sending
    # rank's cannot open its memory everywhere, nor can one on another node: those go through the host.
    devices = {(slot.node, device) for slot in slots for device in slot.device_ids}
    return "ipc" if len(devices) == 1 else "gloo"
