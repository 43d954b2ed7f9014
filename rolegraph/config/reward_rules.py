"""Rules on what reward roles read."""

from __future__ import annotations

from collections.abc import Iterator

from rolegraph.config.schema import RunConfig
from rolegraph.rewards.config import RewardConfig
from rolegraph.rewards.lookup import requires
from rolegraph.role import is_scorer


def text_is_enough(run: RunConfig) -> Iterator[str]:
    """Where an algorithm scores responses as their text (`scores_text`), no reward role asks for token ids."""
    if getattr(run.algorithm.config, "scores_text", False):
        for role in filter(is_scorer, run.roles):
            yield from _scored_as_text(run, role)


def _scored_as_text(run: RunConfig, role: str) -> Iterator[str]:
    """Candidates are scored as their text, the same just drawn or read from a file: there are no token ids."""
    config = run.roles[role].config
    if getattr(config, "skip_special_tokens", True) is False:
        yield (
            f"{role}.skip_special_tokens=false needs token ids, and {run.algorithm.name} scores candidates as their "
            "text, which has no special tokens: remove it"
        )
    reward = config if isinstance(config, RewardConfig) else getattr(config, "reward", None) or run.reward
    if reward is None or not (isinstance(config, RewardConfig) or hasattr(config, "reward")) or reward.problems():
        return
    for spec in reward.functions():
        if "response_ids" in requires(spec.target, reward.external_plugins):
            yield (
                f"{reward.node}.reward_funcs: {spec.target} reads response_ids, and {run.algorithm.name} scores "
                "candidates as their text: let it read response_length (tokens), or leave it out"
            )
