"""The steps of a response: where it is split, which tokens they are, and what their scores amount to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

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
    A step ends with the shortest decoded prefix that has the text up to where the next step begins. A prefix that ends
    inside a character decodes to another text there, so it never counts. All steps are searched for together, from
    where the lengths of single tokens say that they end; most take two prefixes.

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
    guesses = _guesses(ids, texts, asked, decode)
    searches = [_Search(len(ids[row]), guess) for (row, _), guess in zip(asked, guesses, strict=True)]
    while open_ := [i for i, search in enumerate(searches) if search.low < search.high]:
        probes = [searches[i].probe() for i in open_]
        prefixes = decode([ids[asked[i][0]][:probe] for i, probe in zip(open_, probes, strict=True)])
        for i, probe, prefix in zip(open_, probes, prefixes, strict=True):
            row, end = asked[i]
            searches[i].learn(probe, prefix.startswith(texts[row][:end]))
    found: list[list[int]] = [[] for _ in texts]
    for (row, _), end in zip(asked, [search.high for search in searches], strict=True):
        found[row].append(end)
    for row, text in enumerate(texts):
        if text.strip() and step_spans(text, separator):
            found[row].append(len(ids[row]))
    return found


class _Search:
    """For the lowest number that passes, of those up to one that does: first near a guess, further away each time."""

    def __init__(self, most: int, guess: int) -> None:
        self.low, self.high = 0, most
        """The lowest that may pass, and the lowest that is known to."""
        self._guess, self._width = guess, 1
        self._passed = self._failed = False
        """Whether some number that was looked at did."""

    def probe(self) -> int:
        """The number to look at, from `low` to below `high`."""
        if self._passed and self._failed:
            return (self.low + self.high) // 2
        if self._passed:
            return max(self.low, self.high - self._width)
        return min(self.high - 1, self.low + self._width - 1 if self._failed else self._guess)

    def learn(self, number: int, passes: bool) -> None:
        """What became of it."""
        if self._passed or self._failed:
            self._width *= 2
        if passes:
            self.high, self._passed = number, True
        else:
            self.low, self._failed = number + 1, True


def _guesses(
    ids: Sequence[Sequence[int]], texts: Sequence[str], asked: Sequence[tuple[int, int]], decode: Decode
) -> list[int]:
    """About how many tokens of a row have so many characters: by each token's own, which need not add up."""
    rows = {row for row, _ in asked}
    known = sorted({int(token) for row in rows for token in ids[row]})
    length = dict(zip(known, map(len, decode([[token] for token in known])), strict=True))
    sums = {row: np.cumsum([length[int(token)] for token in ids[row]]) for row in rows}
    return [int(np.searchsorted(sums[row], end * sums[row][-1] / max(1, len(texts[row])))) + 1 for row, end in asked]


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
