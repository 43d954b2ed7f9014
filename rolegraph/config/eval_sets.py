"""What follows from a run's eval sets: where their rows come from, what they need, and who scores their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rolegraph.config.check import fill
from rolegraph.config.targets import signature_of
from rolegraph.data.config import SOURCE_KEYS, DataConfig
from rolegraph.evaluation.config import EvalSetConfig
from rolegraph.rewards.config import RewardConfig
from rolegraph.role import EVAL_ROLE, is_scorer

if TYPE_CHECKING:
    from rolegraph.algorithms.options import Needs
    from rolegraph.config.schema import RunConfig

FUNCTIONS = "roles.orm.functions.FunctionORM"
"""The role that runs reward functions of a set's own."""
_OWN = ("limit", "shuffle")
"""What a set does not take from the run's data: that says how much is trained on, and in which order."""


def filled_sets(node: Any, data: Any) -> Any:
    """The node `eval` with every set's `data` whole, by that of the run, and all defaults; null sets are left out."""
    if not isinstance(node, Mapping) or not isinstance(node.get("sets"), Mapping):
        return node
    return {**node, "sets": {name: _filled(each, data) for name, each in node["sets"].items() if each is not None}}


def _filled(node: Any, data: Any) -> Any:
    if not isinstance(node, Mapping):
        return node
    own = node.get("data") or {}
    if isinstance(own, Mapping) and isinstance(data, Mapping):
        left = {*_OWN}
        if own.get("source", data.get("source")) != data.get("source"):
            left |= {*SOURCE_KEYS}
        if own.get("task", data.get("task")) != data.get("task"):
            left.add("task_config")
        known = {each.name for each in fields(DataConfig)}  # what else is in the run's data is reported there
        own = _over({key: value for key, value in data.items() if key in known and key not in left}, own)
    return fill({**node, "data": own}, EvalSetConfig)


def _over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, `own` above; so too for mappings in them."""
    merged = {**below, **own}
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(inner := below.get(key), Mapping):
            merged[key] = _over(inner, value)
    return merged


def needs_of(run: RunConfig, each: EvalSetConfig) -> Needs:
    """How rows of a set are read: with responses (or as text, where the run trains on that) for a loss."""
    if not each.loss:
        return "prompt"
    return "text" if run.data_needs == "text" else "response"


def completion_length(run: RunConfig, each: EvalSetConfig) -> int | None:
    """Tokens that a response of the set may have; null where nobody says."""
    if each.max_completion_length is not None:
        return each.max_completion_length
    longest = getattr(run.algorithm.config, "max_completion_length", None)
    return None if longest is None else int(longest)


def reward_of(run: RunConfig, each: EvalSetConfig) -> RewardConfig | None:
    """Reward functions for the set alone; null: the run's reward roles score it, or nobody does."""
    if each.reward is not None or any(map(is_scorer, run.roles)):
        return each.reward
    return run.reward


def scorer_of(run: RunConfig, name: str) -> str | None:
    """The role that scores a set by functions of its own; null: the run's reward roles do.

    One of the run's that has the same functions, or one for all sets that share them.
    """
    wanted = reward_of(run, run.eval.sets[name])
    if wanted is None:
        return None
    for role, spec in run.roles.items():
        is_like_it = is_scorer(role) and spec.target == FUNCTIONS and spec.config.skip_special_tokens
        if is_like_it and (spec.config.reward or run.reward) == wanted:
            return role
    first = next(other for other, each in run.eval.drawing.items() if reward_of(run, each) == wanted)
    return EVAL_ROLE + first


def with_scorers(run: RunConfig) -> RunConfig:
    """The run with a role of reward functions for the sets that have some of their own."""
    config = signature_of(FUNCTIONS).config
    assert config is not None
    for name, each in run.eval.drawing.items():
        role = scorer_of(run, name)
        if role is not None and role not in run.roles:
            run = run.adding(role, FUNCTIONS, config(reward=reward_of(run, each)))
    return run
