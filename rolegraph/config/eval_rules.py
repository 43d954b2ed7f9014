"""Rules on evaluation: what a set needs is there, and what is configured is used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rolegraph.config.eval_sets import completion_length, needs_of, reward_of
from rolegraph.config.schema import RunConfig
from rolegraph.config.turn_rules import algorithm_roles
from rolegraph.evaluation.config import EvalSetConfig
from rolegraph.role import is_scorer

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"


def only_evaluates(run: RunConfig) -> bool:
    """Whether the run takes no step."""
    return bool(getattr(run.algorithm.config, "only_evaluates", False))


def evaluation_is_due(run: RunConfig) -> Iterator[str]:
    """Sets and the steps after which they are evaluated come together, in runs that take steps."""
    settings = run.eval
    if only_evaluates(run):
        if not settings.sets:
            yield "nothing to evaluate: choose eval=arithmetic, or add a set, eval.sets.NAME.data.source=..."
        if "train" in run.roles and not any(each.loss for each in settings.sets.values()):
            yield "train has nothing to do where no eval set has loss=true: set train=null"
        return
    if settings.every is not None and not settings.sets:
        yield (
            f"eval.every={settings.every} has no set to evaluate: choose eval=arithmetic, or add one, "
            "eval.sets.NAME.data.source=..."
        )
    if settings.sets and settings.every is None:
        names = ", ".join(settings.sets)
        yield f"eval.sets has {names}, and eval.every is null: set eval.every=20, or choose eval=null"
    if settings.sets and "train" not in run.roles:
        yield f"eval.sets evaluates a policy under training, and {run.algorithm.name} trains none: remove it"


def eval_sets_have_what_they_need(run: RunConfig) -> Iterator[str]:
    """Engines to draw by, rewards to measure by, a trainer for a loss."""
    for name, each in run.eval.sets.items():
        key = f"eval.sets.{name}"
        if not re.fullmatch(NAME, name):
            yield f"eval.sets has a set {name!r}: name it with letters, digits, - and _, a letter or a digit first"
        if each.loss and "train" not in run.roles:
            yield f"{key}.loss=true needs the role that trains: add train=megatron, or set it to false"
        if each.loss and needs_of(run, each) == "text" and each.data.source == "reasoning_gym":
            yield f"{key}.loss=true reads a column `text`, which data.source=reasoning_gym lacks: choose another source"
        if each.samples:
            yield from _draws(run, key, each)


def _draws(run: RunConfig, key: str, each: EvalSetConfig) -> Iterator[str]:
    if "rollout" not in run.roles:
        if "train" in run.roles:
            yield f"{key} draws responses, and no role does: add rollout=vllm, or set {key}.n=0 {key}.loss=true"
        else:
            yield f"{key} draws responses, and no role does: add rollout=vllm"
    if completion_length(run, each) is None:
        yield (
            f"{key}.max_completion_length is null, and {run.algorithm.name} has no such length to take: set "
            f"{key}.max_completion_length=256"
        )
    if reward_of(run, each) is None and not any(map(is_scorer, run.roles)):
        yield f"{key} has no reward functions: set {key}.reward.reward_funcs=[exact_match], or reward=NAME"
    elif reward_of(run, each) is None and not _scores_responses(run):
        yield (
            f"{key} measures the rewards of whole responses, and no reward role of this run has a part in those: set "
            f"{key}.reward.reward_funcs=[exact_match], or orm=functions"
        )


def _scores_responses(run: RunConfig) -> bool:
    """Whether the sum of the run's scores has a summand: with prm_reward=per_step the prm is none."""
    options = run.algorithm.config
    weights = getattr(options, "score_weights", {})
    left_out = {"prm"} if getattr(options, "prm_reward", None) == "per_step" else set()
    return any(is_scorer(role) and role not in left_out and weights.get(role, 1.0) for role in run.roles)


def rollout_has_work(run: RunConfig) -> Iterator[str]:
    """Engines that only evaluation may use have a set to draw for."""
    if getattr(run.algorithm.config, "draws_samples", True) or "rollout" not in run.roles:
        return
    try:
        is_optional = algorithm_roles(run.algorithm.target)[0]["rollout"][1]
    except Exception:  # another rule says so
        return
    if is_optional and not run.eval.drawing:
        yield (
            f"rollout has nothing to do: {run.algorithm.name} draws no samples here, and no eval set does: set "
            "rollout=null, or choose eval=arithmetic"
        )
