"""Numbers about samples from their light columns, and about steps, under the names a log has them by."""

from __future__ import annotations

import numpy as np

from rolegraph.batch import Batch
from rolegraph.interfaces import FAULT_REASONS, Metrics
from rolegraph.losses.advantages import Groups


def of_step(metrics: Metrics) -> Metrics:
    """A train role's metrics, its own time under a name that says it is one."""
    return {("seconds/optimizer_step" if name == "seconds" else name): value for name, value in metrics.items()}


def of_samples(samples: Batch, groups: Groups) -> Metrics:
    """What one generation drew."""
    return {**of_rewards(samples), **of_groups(groups), **of_lengths(samples)}


def of_rewards(samples: Batch) -> Metrics:
    """Mean and standard deviation of the rewards there are, the means of their parts, what is missing, and why.

    Scores by role are told where there are several, or that of a prm, whose parts have no number.
    """
    reward = samples.numpy("reward")
    found: Metrics = {
        "reward/mean": _mean(reward),
        "reward/std": float(np.nanstd(reward)) if np.isfinite(reward).any() else 0.0,
        "reward/null": float(np.count_nonzero(~np.isfinite(reward))),
    }
    if "reward_faults" in samples:
        found["reward/faults"] = float(samples.numpy("reward_faults").sum())
    scores = [name for name in samples.column_names if name.startswith("scores/")]
    for name in scores if scores != ["scores/orm"] else []:
        values = samples.numpy(name)
        found |= {f"{name}/mean": _mean(values), f"{name}/null": float(np.count_nonzero(~np.isfinite(values)))}
    for name in samples.column_names:
        if name.startswith("rewards/"):
            found[f"{name}/mean"] = _mean(samples.numpy(name))
        elif name.startswith("reward_faults/"):
            counts = np.bincount(samples.numpy(name), minlength=len(FAULT_REASONS) + 1)[1:]
            function = name.removeprefix("reward_faults/")
            found |= {
                f"rewards/{function}/faults/{reason}": float(count)
                for reason, count in zip(FAULT_REASONS, counts, strict=True)
                if count
            }
    return found


def of_privileged(samples: Batch) -> Metrics:
    """The mean reward of the rows whose teacher has a prompt of its own, where the others have none."""
    if "teacher_prompt_length" not in samples or "reward" not in samples:
        return {}
    own = samples.numpy("teacher_prompt_length") > 0
    return {"reward/teacher_prompt/mean": _mean(samples.numpy("reward")[own])} if own.any() and not own.all() else {}


def of_groups(groups: Groups) -> Metrics:
    """Prompts sampled, the share of them whose rewards are all equal, and those without any reward."""
    return {
        "groups/count": float(len(groups.ids)),
        "groups/equal": float(groups.equal.mean()) if len(groups.ids) else 0.0,
        "groups/empty": float(len(groups.empty)),
    }


def of_lengths(samples: Batch) -> Metrics:
    """Response tokens a row, and the share of rows that were cut off."""
    lengths = samples.numpy("response_length")
    if not len(lengths):
        return {}
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/truncated": float(truncated(samples).mean()),
    }


def of_versions(samples: Batch, version: int) -> Metrics:
    """Of samples that are trained on at `version`: the oldest weights they began with, and how stale the rows are.

    A row's staleness is the number of syncs since the weights of its first token.
    """
    if "weight_version" not in samples or not len(samples):
        return {}
    first = samples.numpy("weight_version")
    staleness = version - first
    return {
        "weight_version": float(first.min()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }


def truncated(samples: Batch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[rows] whether the response was cut off at the longest length allowed."""
    return np.asarray([reason == "length" for reason in samples["finish_reason"].to_pylist()], dtype=bool)


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    present = values[np.isfinite(values)]
    return float(present.mean()) if len(present) else 0.0
