"""The steps of a response: where it is split, which tokens they are, and what their scores amount to. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from rolegraph.errors import AlignmentError
from rolegraph.interfaces import StepReduce

SEPARATOR = "\n\n"
"""What stands between two steps unless a config says otherwise: an empty line."""

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""From rows of token ids to their texts."""


def step_spans(text: str, separator: str = SEPARATOR) -> list[tuple[int, int]]:
    """Start and end of each step in `text`, in characters; separators are in no step, and blank pieces are none.

    >>> step_spans("a; b;; ", "; ")
    [(0, 1), (3, 5)]
    """
    spans, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            spans.append((start, start + len(piece)))
        start += len(piece) + len(separator)
    return spans


def split_steps(text: str, separator: str = SEPARATOR) -> list[str]:
    """The steps of a response, as they stand in it; an empty response has none."""
    return [text[start:end] for start, end in step_spans(text, separator)]


def step_ends(
    ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    decode: Decode,
    separator: str = SEPARATOR,
    uids: Sequence[str] | None = None,
) -> list[list[int]]:
    """The token behind the last one of each step, a list a response; the last of them is the response's length.

    What stands between two steps belongs to the first of them, and so does a token that reaches into the next one.
    The tokens of all steps are found by one binary search over decoded prefixes: the shortest that has the text up to
    where the next step begins. A prefix that ends inside a character decodes to another text there, so it never counts.

    Raises AlignmentError, naming the uid (else the row's number), where ids decode to another text than is given.
    """
    wholes = decode(ids)
    for row, (text, whole) in enumerate(zip(texts, wholes, strict=True)):
        if text != whole:
            raise AlignmentError(
                f"row {row if uids is None else uids[row]}: response_text is not what response_ids decode to, so its "
                f"steps have no tokens ({_difference(text, whole)}); is the tokenizer another model's?"
            )
    # Of every step but a row's last: the row, and where the next step begins.
    asked = [(row, start) for row, text in enumerate(texts) for start, _ in step_spans(text, separator)[1:]]
    low = np.zeros(len(asked), np.int64)
    high = np.asarray([len(ids[row]) for row, _ in asked], np.int64)
    guess = _guesses(ids, asked, decode)
    # Where tokens are as long within a text as they are alone, the first two rounds find the end: at the guess there is
    # enough of the text, one token before there is not.
    for round_ in itertools.count():
        if not (low < high).any():
            break
        middle = np.clip(guess - round_, low, np.maximum(high - 1, low)) if round_ < 2 else (low + high) // 2
        open_ = np.flatnonzero(low < high)
        prefixes = decode([ids[asked[i][0]][: middle[i]] for i in open_])
        for i, prefix in zip(open_, prefixes, strict=True):
            row, end = asked[i]
            if prefix.startswith(texts[row][:end]):
                high[i] = middle[i]
            else:
                low[i] = middle[i] + 1
    found: list[list[int]] = [[] for _ in texts]
    for (row, _), end in zip(asked, high.tolist(), strict=True):
        found[row].append(end)
    for row, text in enumerate(texts):
        if text.strip() and step_spans(text, separator):
            found[row].append(len(ids[row]))
    return found


def _guesses(ids: Sequence[Sequence[int]], asked: Sequence[tuple[int, int]], decode: Decode) -> np.ndarray[Any, Any]:
    """[asked] about how many tokens of a row make so many characters."""
    known = sorted({token for row, _ in asked for token in ids[row]})
    lengths = dict(zip(known, map(len, decode([[token] for token in known])), strict=True))
    sums = {row: np.cumsum([lengths[token] for token in ids[row]]) for row in {row for row, _ in asked}}
    return np.asarray([np.searchsorted(sums[row], end) + 1 for row, end in asked], np.int64)


def reduce_steps(scores: Sequence[float | None], reduce: StepReduce) -> float | None:
    """What the scores of a response's steps amount to; None where there is none, or one of them is None.

    >>> reduce_steps([0.5, 1.0, 0.75], "mean")
    0.75
    """
    if reduce not in get_args(StepReduce):
        raise ValueError(f"reduce={reduce!r}: choose one of {', '.join(get_args(StepReduce))}")
    known = [score for score in scores if score is not None]
    if not known or len(known) < len(scores):
        return None
    return {"min": min(known), "mean": sum(known) / len(known), "last": known[-1]}[reduce]


def _difference(text: str, whole: str) -> str:
    """Where two texts part."""
    at = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole)))
    return f"from character {at} on: {text[at : at + 20]!r} and {whole[at : at + 20]!r}"
