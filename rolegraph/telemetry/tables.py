"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from rolegraph.telemetry.progress import figure

WIDTH = 110


def as_text(tables: Iterable[tuple[Sequence[str], Sequence[Sequence[Any]]]]) -> str:
    """Tables under each other, each a header and rows; the first column is text, the others are numbers or null.

    >>> print(as_text([(("score", "min", "null"), [("orm", 0.12345, 1200), ("prm", None, 0)])]))
    score    min   null
    orm    0.123  1,200
    prm        -      0
    """
    text = StringIO()
    console = Console(file=text, width=WIDTH, markup=False, highlight=False)
    for header, rows in tables:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*map(_cell, row))
        console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else figure(value) if isinstance(value, float) else str(value)
