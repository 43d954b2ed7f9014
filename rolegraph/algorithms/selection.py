"""Which candidates of a dataset row are kept: pure functions of the row's own candidates and their scores.

Nothing here sees another row, an order of arrival or a worker: candidates are compared in the order of their repeats,
so a row's result is the same however its candidates were split and drawn.

A role's score of a candidate is one number: the `reward` of an outcome role, the `prm_score` of a process role. A null
score could not be told. It is no low score: such a candidate does not pass where the score is asked for, and it is no
example of a bad response either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rolegraph.role import family

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Scores = Mapping[str, float | None]

Output = Literal["kept", "pairs"]


@dataclass(frozen=True)
class Candidate:
    """One response to a row, as selection sees it."""

    repeat: int
    scores: Scores
    """By reward role; null where none could be told."""
    answered: bool = True
    """Whether there is a response that says anything."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What passes, and how much of it is kept."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Of each reward role there is, in the total."""
    prm_threshold: float | None = None
    """A candidate passes with a process score above it; null: asked of none."""
    easy_query_threshold: float | None = None
    """A row is dropped where this share of its candidates, or a larger one, has outcome rewards above 0."""
    n_best_to_keep: int | None = None
    """Passing candidates to keep of a row; null: all."""
    output: Output = "kept"

    @property
    def outcome_roles(self) -> tuple[str, ...]:
        """The roles whose reward has to be above 0."""
        return tuple(role for role in sorted(self.weights) if family(role) == "orm")

    @property
    def can_fail(self) -> bool:
        """Whether there is any condition on scores."""
        return bool(self.outcome_roles) or self.prm_threshold is not None


@dataclass(frozen=True)
class Selection:
    """What became of one row."""

    kept: tuple[int, ...]
    """Repeats, the best first; for pairs the preferred one alone."""
    rejected: int | None
    """The repeat of the rejected response of a pair."""
    passed: int
    """Candidates that passed."""
    totals: Mapping[int, float | None]
    """Weighted sum of the normalised scores by repeat; null where a score of weight other than 0 is."""
    failed: Mapping[int, str]
    """Why a candidate did not pass, by repeat."""
    dropped: str | None
    """Why nothing of the row is kept; null where something is."""


def select(candidates: Sequence[Candidate], rules: Rules) -> Selection:
    """Choose among the candidates of one row, all of them.

    Ties go to the lower repeat. Raises ValueError where a repeat comes twice.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.repeat)
    repeats = [candidate.repeat for candidate in ordered]
    if len(set(repeats)) < len(repeats):
        raise ValueError(f"two candidates of one row have the same repeat: {repeats}")
    totals = dict(zip(repeats, totals_of(ordered, rules.weights), strict=True))
    failed = {c.repeat: reason for c in ordered if (reason := why_not(c, rules)) is not None}
    passing = sorted((r for r in repeats if r not in failed), key=lambda repeat: _best_first(totals[repeat], repeat))
    rejected = None
    kept: Sequence[int] = passing if rules.n_best_to_keep is None else passing[: rules.n_best_to_keep]
    dropped = why_dropped(ordered, rules, len(passing))
    if rules.output == "pairs" and dropped is None:
        kept, rejected, dropped = _pair(ordered, passing, totals, rules)
    if dropped is not None:
        kept, rejected = [], None
    return Selection(tuple(kept), rejected, len(passing), totals, failed, dropped)


def why_not(candidate: Candidate, rules: Rules) -> str | None:
    """The first condition a candidate does not meet; null where it passes."""
    if not candidate.answered:
        return "no response"
    for role in rules.outcome_roles:
        reward = candidate.scores.get(role)
        if reward is None:
            return f"{role}: no score"
        if not reward > 0:
            return f"{role}: not above 0"
    if rules.prm_threshold is not None:
        score = candidate.scores.get("prm")
        if score is None:
            return "prm: no score"
        if not score > rules.prm_threshold:
            return f"prm: not above {rules.prm_threshold:g}"
    return None


def fails(candidate: Candidate, rules: Rules) -> bool:
    """Whether a response is told to be none that passes, by a score that is there."""
    told = [(candidate.scores.get(role), 0.0) for role in rules.outcome_roles]
    if rules.prm_threshold is not None:
        told.append((candidate.scores.get("prm"), rules.prm_threshold))
    return candidate.answered and any(score is not None and not score > least for score, least in told)


def why_dropped(candidates: Sequence[Candidate], rules: Rules, passed: int) -> str | None:
    """Why nothing of a row is kept, whatever the output."""
    if not any(candidate.answered for candidate in candidates):
        return "no response"
    if is_easy(candidates, rules):
        return "too easy"
    return None if passed else "no candidate passed"


def is_easy(candidates: Sequence[Candidate], rules: Rules) -> bool:
    """Whether so many of all its candidates have outcome rewards above 0 that a row teaches little."""
    if rules.easy_query_threshold is None or not candidates:
        return False
    solved = sum(all((c.scores.get(role) or 0.0) > 0 for role in rules.outcome_roles) for c in candidates)
    # Counted, not divided: 7 of 10 are a share of 0.7, which 0.7 * 10 in floating point is not exactly.
    return solved >= math.ceil(rules.easy_query_threshold * len(candidates) - 1e-9)


def totals_of(candidates: Sequence[Candidate], weights: Mapping[str, float]) -> list[float | None]:
    """Of each candidate the sum of weight * normalised score; null where a score that counts is null."""
    total = np.zeros(len(candidates))
    for role in sorted(weights):
        if weights[role]:
            total = total + weights[role] * normalised([candidate.scores.get(role) for candidate in candidates])
    return [float(value) if np.isfinite(value) else None for value in total]


def normalised(scores: Sequence[float | None]) -> Floats:
    """[candidates] a row's scores of one role from 0 (its lowest) to 1 (its highest); 0 each where all are equal.

    A null score is NaN, and the others are what they would be without it.
    """
    values = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    told = values[np.isfinite(values)]
    if not len(told):
        return np.full(len(values), np.nan)
    low, high = told.min(), told.max()
    if low == high:
        return np.where(np.isfinite(values), 0.0, np.nan)
    if max(abs(low), abs(high)) > 1e307:  # their difference might be none; exact, for they have no digits to lose
        values, low, high = values / 4, low / 4, high / 4
    return np.where(np.isfinite(values), (values - low) / (high - low), np.nan)


def data_part(rows: int, part: tuple[int, int]) -> range:
    """The rows of the i-th (from 0) of n contiguous parts, whose sizes differ by at most one; all rows are in one.

    >>> [list(data_part(5, (i, 3))) for i in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    index, parts = part
    size, longer = divmod(rows, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def _pair(
    ordered: Sequence[Candidate], passing: Sequence[int], totals: Mapping[int, float | None], rules: Rules
) -> tuple[Sequence[int], int | None, str | None]:
    """The best passing candidate and the worst of those whose scores say that they do not pass."""
    if len(passing) == len(ordered):
        return (), None, "every candidate passed: no pair"
    worst = min(
        ((total, c.repeat) for c in ordered if fails(c, rules) and (total := totals[c.repeat]) is not None),
        default=None,
    )
    if worst is None:
        return (), None, "no failed candidate has a score: no pair"
    return passing[:1], worst[1], None


def _best_first(total: float | None, repeat: int) -> tuple[bool, float, int]:
    return total is None, 0.0 if total is None else -total, repeat
