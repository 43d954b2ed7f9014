"""Where in a response its answer stands. Pure string functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

Extract = Literal["auto", "text", "answer", "boxed", "number", "last_line"]

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|(?<![\w.])[-+\u2212]?\.\d+"
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def extract(text: str, where: Extract = "auto") -> str | None:
    r"""The answer in a response, stripped, or None where there is none.

    - text: all of it
    - answer: inside the last complete `<answer>...</answer>`
    - boxed: inside the last complete `\boxed{...}`, braces balanced
    - number: the last number (`1,234` gives 1234; a minus after a digit or word is no sign)
    - last_line: the last line that is not blank
    - auto: tags, else the box, else all of it; what stands before a `</think>` never counts
    """
    if where not in _EXTRACTORS:
        raise ValueError(f"extract={where!r}: choose one of {', '.join(get_args(Extract))}")
    found = _EXTRACTORS[where](text)
    return None if found is None else found.strip()


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; an unfinished thought has no answer after it."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return rest
    return "" if text.lstrip().startswith("<think>") else text


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    # A tag that was opened twice counts from its last opening.
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        if rest.startswith("{"):
            if (end := _closing_brace(rest)) is not None:
                return rest[1:end]
        elif word := re.match(r"[^\s$.,;]+", rest):
            return word.group()
    return None


def _closing_brace(text: str) -> int | None:
    """Index of the brace that closes the one at 0; `\\{` and `\\}` are characters, not braces."""
    depth, index = 0, 0
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
        index += 1
    return None


def _number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("\u2212", "-").lstrip("+") if numbers else None


def _last_line(text: str) -> str | None:
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


def _auto(text: str) -> str | None:
    rest = after_thinking(text)
    for extractor in (_tagged, _boxed):
        if (found := extractor(rest)) is not None:
            return found
    return rest if rest.strip() else None


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "auto": _auto,
    "text": lambda text: text,
    "answer": _tagged,
    "boxed": _boxed,
    "number": _number,
    "last_line": _last_line,
}
