"""Scores out of what a judge replied. Pure: what cannot be read is said in words, and is never a number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rolegraph.rewards.extract import after_thinking

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_SCORE = re.compile(rf"\bscore\b[\W_]*?(?:is\b[\W_]*?)?({_NUMBER})(?![\w.]*\s*[/%]|\w)", re.IGNORECASE)
_STEP = re.compile(rf"^\W*step\s*(\d+)\b\W*?(?:score\W*?)?({_NUMBER})[\s*_.]*$", re.IGNORECASE | re.MULTILINE)
_SHOWN = 80


@dataclass(frozen=True)
class Bounds:
    """Between which numbers a score lies."""

    lowest: float
    highest: float

    def why_not(self, score: float) -> str | None:
        """What is wrong with a number as a score."""
        if math.isfinite(score) and self.lowest <= score <= self.highest:
            return None
        return f"{score:g} is not between {self.lowest:g} and {self.highest:g}"


class UnreadableError(Exception):
    """A reply without the scores that were asked for; the message says what came instead."""


def read_score(reply: str, bounds: Bounds, pattern: str | None = None) -> float:
    """The score in a reply, thoughts aside: the last that `pattern` finds.

    Without a pattern, that of the last JSON object with a number `score`, else of the last `Score: X`, else the reply
    where it is a number. Raises UnreadableError.
    """
    text = after_thinking(reply)
    if pattern is not None:
        found = [match[1] for match in re.finditer(pattern, text)]
    else:
        found = [value["score"] for value in _json_in(text, "{") if _is_number(value.get("score"))]
        found = found or [match[1] for match in _SCORE.finditer(text)]
        found = found or ([text.strip()] if re.fullmatch(_NUMBER, text.strip()) else [])
    if not found:
        raise UnreadableError(f"no score in {shown(reply)}")
    return _score(found[-1], bounds, reply)


def read_steps(reply: str, steps: int, bounds: Bounds, pattern: str | None = None) -> list[float | None]:
    """The score of each step in a reply, thoughts aside: those that `pattern` finds, in order.

    Without a pattern, the last JSON list of numbers (null for a step that the judge leaves out), else the lines
    `Step i: X`. Raises UnreadableError, also for another number of scores than there are steps.
    """
    text = after_thinking(reply)
    found: list[Any]
    if pattern is not None:
        found = [match[1] for match in re.finditer(pattern, text)]
    else:
        lists = [value for value in _json_in(text, "[") if value and all(v is None or _is_number(v) for v in value)]
        found = lists[-1] if lists else _lines(text, reply)
    if not found:
        raise UnreadableError(f"no scores in {shown(reply)}")
    if len(found) != steps:
        raise UnreadableError(f"{len(found)} scores for {steps} steps in {shown(reply)}")
    return [None if value is None else _score(value, bounds, reply) for value in found]


def shown(reply: str) -> str:
    """The end of a reply on one line, where its scores should be."""
    line = " ".join(reply.split())
    return repr(line if len(line) <= _SHOWN else f"...{line[-_SHOWN:]}")


def _lines(text: str, reply: str) -> list[str]:
    lines = _STEP.findall(text)
    numbers = [int(number) for number, _ in lines]
    if numbers != list(range(1, len(lines) + 1)):
        raise UnreadableError(f"scores for steps {', '.join(map(str, numbers))} in {shown(reply)}")
    return [score for _, score in lines]


def _score(value: Any, bounds: Bounds, reply: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UnreadableError(f"{value!r} is no number in {shown(reply)}") from None
    if wrong := bounds.why_not(score):
        raise UnreadableError(f"{wrong} in {shown(reply)}")
    return score


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_in(text: str, opening: str) -> Iterator[Any]:
    """The JSON objects or lists that stand in a text, in order, those inside others aside."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find(opening, at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            yield value
        except (ValueError, RecursionError):
            at += 1
