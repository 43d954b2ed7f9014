"""The built-in functions that score the steps of a response.

Each takes the steps (a list of strings a response) and, by name, columns of the rows and settings as reward functions
do; it returns a list a response with one number a step, None for a step it cannot judge.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any


def arithmetic_steps(steps: Sequence[Sequence[str]], *, no_equation: float | None = 1.0) -> list[list[float | None]]:
    """1 where all equations between numbers in a step are right (`3 * 4 = 12`), 0 where one of them is wrong.

    A step without any has `no_equation`: nothing in it is wrong. What is no arithmetic (variables, units, words) is
    passed over rather than guessed at; a decimal number need only be right as far as it goes (10 / 3 = 3.33).
    """
    scores: list[list[float | None]] = []
    for response in steps:
        found = [equations(step) for step in response]
        scores.append([float(all(checks)) if checks else no_equation for checks in found])
    return scores


STEP_FUNCTIONS: dict[str, Callable[..., Any]] = {"arithmetic_steps": arithmetic_steps}

_MOST_CHARACTERS = 300
"""Of an equation; a longer run of digits and signs is a table or noise."""
_MOST_BITS = 4096
"""Of a power's result."""
_PLAIN = (
    (re.compile(r"^[ \t]*(?:\*|\(?\d+[.):])[ \t]+", re.MULTILINE), ""),  # list marks
    (re.compile(r"^[ \t]*-[ \t]+(?=\d)", re.MULTILINE), "of "),  # a list mark or a sign: not to be judged
    (re.compile(r"\\boxed\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\times|\\cdot|[\u00d7\u00b7\u2217]"), "*"),
    (re.compile(r"(?<=\d)\s*x\s*(?=\d)"), "*"),
    (re.compile(r"\\div|\u00f7"), "/"),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\\left|\\right|\\[,;! ()\[\]]|[$&\u20ac\u00a3]"), ""),
    (re.compile(r"\^\{([^{}]*)\}"), r"^(\1)"),
    (re.compile(r"((?<=[\d)])\s*\*\*\s*(?=[-(\d]))|\*\*"), r"\1"),  # bold goes, a power stays
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(\d+(?:\.\d+)?)\s?\\?%"), r"(\1/100)"),
    (re.compile(r"\.(?!\d)"), ";"),  # the end of a sentence
)
_RUN = re.compile(r"[-+*/^().=\d \t]+")
_WORKED = re.compile(r"[-+*/^]")
_GOES_ON = re.compile(r"[\w\\}\]>]\Z")
_IN_WORDS = re.compile(r"\b(?:of|by|from|than|times|plus|minus|over)[ \t]*\Z")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def equations(text: str) -> list[bool]:
    """Whether each equation between numbers in `text` holds, in order.

    >>> equations("So 2 + 3 = 5, then 5 * 4 = 21; x + 1 = 7 says nothing.")
    [True, False]
    """
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    found = []
    for run in _RUN.finditer(text):
        if "=" not in run[0] or len(run[0]) > _MOST_CHARACTERS:
            continue
        sides = _whole_sides(text, run)
        for left, right in pairwise(sides):
            if left is not None and right is not None and (_WORKED.search(left[1:]) or _WORKED.search(right[1:])):
                values = _value(left), _value(right)
                if values[0] is not None and values[1] is not None:
                    found.append(abs(values[0] - values[1]) <= max(_slack(left), _slack(right)))
    return found


def _whole_sides(text: str, run: re.Match[str]) -> list[str | None]:
    """What stands between the equality signs of a run; None for an end that is part of something else."""
    sides: list[str | None] = [side.strip() or None for side in run[0].split("=")]
    before = text[: run.start()]
    # `f(2) = 4` is about f, `x - 3 = 4` about x, and `half of 8 + 2 = 6` right.
    adjacent = not run[0][0].isspace() and _GOES_ON.search(before)
    signed = re.match(r"\s+-[\d.(]", run[0]) and re.search(r"[A-Za-z]{2,}\Z", before)  # `and -3 + 5 = 2`
    continues = run[0].lstrip()[0] in "-+*/^" and _GOES_ON.search(before.rstrip(" \t")) and not signed
    if adjacent or continues or _IN_WORDS.search(before):
        sides[0] = None
    after = text[run.end() : run.end() + 1]
    if (after.isalpha() or after in ("\\", "_", "{")) and not run[0][-1].isspace():
        sides[-1] = None
    return sides


def _value(side: str) -> Fraction | None:
    """The value of an arithmetic expression; None where it is none."""
    try:
        return _evaluated(ast.parse(side.replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Pow):
            bits = max(left.numerator.bit_length(), left.denominator.bit_length())
            if right.denominator != 1 or abs(right) * bits > _MOST_BITS:
                raise ValueError("no power of a size to compute")
            return Fraction(left ** int(right))
        if type(node.op) in _OPERATORS:
            return Fraction(_OPERATORS[type(node.op)](left, right))
    raise ValueError("no arithmetic")


def _slack(side: str) -> Fraction:
    """How far a value may be off for a side that is a rounded number: half the last place of a decimal or percentage.

    >>> _slack("3.33"), _slack("7")
    (Fraction(1, 200), Fraction(0, 1))
    """
    if percent := re.fullmatch(r"-?\(\d+\.?(\d*)/100\)", side):
        return Fraction(1, 200 * 10 ** len(percent[1]))
    decimals = re.fullmatch(r"-?\d*\.(\d+)", side)
    return Fraction(1, 2 * 10 ** len(decimals[1])) if decimals else Fraction(0)
