"""The built-in reward functions.

Each takes the completions and, by name, columns of the rows (parameters without a default) and settings (parameters
with one); it returns one number a completion, or None where the row cannot be judged. Verifiers' libraries are imported
when first used, and by `WARM_UP` once for all workers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from rolegraph.rewards.extract import Extract, after_thinking, extract

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
THINK_OPEN = r"\s*<think>"
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)(?![A-Za-z]))[A-Za-z]{2,}")


def exact_match(
    completions: list[str],
    *,
    answer: Sequence[object],
    extract_from: Extract = "auto",
    ignore_case: bool = False,
) -> list[float | None]:
    """1 where the extracted answer equals the column `answer`, white space aside, else 0; null where `answer` is."""

    def normal(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        found = extract(completion, extract_from)
        same = found is not None and normal(found) == normal(_text(gold))
        scores.append(None if gold is None else float(same))
    return scores


def math_equivalence(
    completions: list[str],
    *,
    answer: Sequence[object],
    extract_from: Extract = "auto",
    strict: bool = True,
) -> list[float | None]:
    """1 where math-verify finds the response's answer equal to the column `answer` (LaTeX or plain), else 0.

    Null where `answer` itself cannot be read. `auto` leaves the search outside `<answer>` tags to math-verify.
    """
    return [
        None if gold is None else _same_value(_text(gold), completion, extract_from, strict)
        for completion, gold in zip(completions, answer, strict=True)
    ]


def format(completions: list[str], *, pattern: str = THINK_ANSWER, think_in_prompt: bool = False) -> list[float]:
    """1 where the whole response has the form of `pattern`, else 0; `.` matches line ends too.

    The default form is `<think>...</think><answer>...</answer>`, each tag once. `think_in_prompt`: the chat template
    has opened `<think>` already.
    """
    if think_in_prompt:
        pattern = pattern.replace(THINK_OPEN, "", 1)
    form = re.compile(pattern, re.DOTALL)
    return [float(form.fullmatch(completion) is not None) for completion in completions]


def regex(
    completions: list[str],
    *,
    pattern: str | Sequence[str | None],
    mode: Literal["search", "fullmatch"] = "search",
    extract_from: Extract = "text",
    ignore_case: bool = False,
) -> list[float | None]:
    """1 where `pattern` is found, else 0. The pattern is a setting, or a column with one a row (null: no reward)."""
    patterns = [pattern] * len(completions) if isinstance(pattern, str) else pattern
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    scores: list[float | None] = []
    for completion, form in zip(completions, patterns, strict=True):
        found = extract(completion, extract_from)
        if form is None:
            scores.append(None)
        else:
            scores.append(float(found is not None and getattr(re, mode)(form, found, flags) is not None))
    return scores


def reasoning_gym(
    completions: list[str],
    *,
    task: Sequence[str],
    entry: Sequence[str | Mapping[str, Any]],
    extract_from: Extract = "auto",
    partial: bool = True,
) -> list[float]:
    """The task's own verifier, 0 to 1.

    `task` is its name, `entry` the generated item (a JSON string). Many verifiers give part of a point to an answer
    that is near or that only contains the right one; `partial: false` makes everything below 1 a 0.
    """
    scores = []
    for completion, name, item in zip(completions, task, entry, strict=True):
        verifier = _verifier(name)
        score = float(verifier(extract(completion, extract_from), json.loads(item) if isinstance(item, str) else item))
        scores.append(score if partial or score >= 1 else 0.0)
    return scores


def soft_overlong(
    completions: list[str], *, response_length: Sequence[int | None], max_length: int = 0, cache: int = 0
) -> list[float | None]:
    """0 up to `max_length - cache` tokens, then falling to -1 at `max_length` and beyond; null where nobody counted.

    Equation 13 of DAPO, https://arxiv.org/abs/2503.14476.
    """
    limit = max_length - cache
    return [None if size is None else -min(1.0, max(0.0, (size - limit) / cache)) for size in response_length]


def length_penalty(
    completions: list[str],
    *,
    response_length: Sequence[int | None],
    per_token: float = 0.001,
    free: int = 0,
    floor: float = -1.0,
) -> list[float | None]:
    """Minus `per_token` for each token past the first `free`, never below `floor`; null where nobody counted."""
    return [None if size is None else max(floor, -per_token * max(0, size - free)) for size in response_length]


BUILTIN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (exact_match, math_equivalence, format, regex, reasoning_gym, soft_overlong, length_penalty)
}


def setting_problems(name: str, kwargs: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values given to a built-in function."""
    found = []
    where = kwargs.get("extract_from", "text")
    if where not in get_args(Extract):
        found.append(f"{name}: extract_from={where!r} is none of {', '.join(get_args(Extract))}")
    if kwargs.get("mode", "search") not in ("search", "fullmatch"):
        found.append(f"{name}: mode={kwargs['mode']!r} is none of search, fullmatch")
    if isinstance(pattern := kwargs.get("pattern"), str):
        try:
            re.compile(pattern)
        except re.error as error:
            found.append(f"{name}: pattern={pattern!r} is no regular expression: {error}")
    if name == "soft_overlong":
        length, cache = kwargs.get("max_length", 0), kwargs.get("cache", 0)
        if not (isinstance(length, int) and isinstance(cache, int) and 0 < cache <= length):
            found.append(
                f"{name}: max_length={length}, cache={cache}: both are needed, in tokens, with 0 < cache <= max_length "
                "(write max_length: ${algorithm.max_completion_length})"
            )
    return found


def _text(value: object) -> str:
    """A reference answer as text; a column of numbers may have made 7 a 7.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _same_value(gold: str, completion: str, extract_from: Extract, strict: bool) -> float | None:
    from math_verify import verify

    expected = _gold(gold)
    if not expected:
        return None
    found: str | None
    if extract_from == "auto":
        found = extract(completion, "answer")
        found = after_thinking(completion) if found is None else found
    else:
        found = extract(completion, extract_from)
    if not found or not found.strip():
        return 0.0
    answers = _parse(found)
    # math-verify's own deadline is an alarm signal, which only a main thread can take: the worker's deadline holds.
    try:
        same = verify(list(expected), answers, strict=strict, timeout_seconds=None, raise_on_error=True)
    except Exception:
        # One reading of the answer cannot be compared; another one may be equal. If none is, it is a fault, not a 0.
        if not verify(list(expected), answers, strict=strict, timeout_seconds=None):
            raise
        same = True
    return float(same)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # In running text math-verify looks for delimited LaTeX, then for the last number. A bare formula has no delimiters,
    # and its last number (the 1 of x^2 + 1) is not its value.
    bare = "\n" not in text.strip() and not _DELIMITED.search(text) and not _WORDS.search(text)
    found: list[Any] = parse(f"${text.strip()}$", parsing_timeout=None) if bare and text.strip() else []
    return found or parse(text, parsing_timeout=None)


@lru_cache(maxsize=4096)
def _gold(text: str) -> tuple[Any, ...]:
    # GSM8K writes its answers after four number signs.
    return tuple(_parse(text.rpartition("####")[2].strip()))


@lru_cache(maxsize=256)
def _verifier(task: str) -> Callable[[str | None, Mapping[str, Any]], float]:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}")
    verifier: Callable[[str | None, Mapping[str, Any]], float] = get_score_answer_fn(task)
    return verifier


def _warm_math() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _same_value(r"\frac{1}{2}", r"so $\boxed{0.5}$", "auto", True)


def _warm_reasoning_gym() -> None:
    _verifier("chain_sum")


WARM_UP: dict[str, Callable[[], None]] = {"math_equivalence": _warm_math, "reasoning_gym": _warm_reasoning_gym}
"""Run once before workers are forked: imports and caches that every one of them shares."""
