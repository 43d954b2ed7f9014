"""What became of the rows of a source: how many came in, how many were kept, and why the others were not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EXAMPLES, PLACES = 3, 1000
"""Places told, and remembered, for each reason."""


class BadRowError(Exception):
    """A row that cannot be used; `reason` is what is counted, `detail` what is particular to this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass
class Report:
    """Counts of rows by what happened to them, with the first few places of each reason."""

    source: str = ""
    rows: int = 0
    """Rows read, the broken ones included."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    repaired: Counter[str] = field(default_factory=Counter)
    """Rows kept after a change (cut on the left, broken characters replaced), by what changed."""
    notes: list[str] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    content: str = ""
    """A hash of all columns of the rows that were kept, in their order."""

    def drop(self, where: str, row: BadRowError) -> None:
        """Count a row that is left out, and remember where it was if it is among the first of its reason."""
        self.dropped[row.reason] += 1
        places = self.places.setdefault(row.reason, [])
        if len(places) < PLACES:
            places.append(f"{where} ({row.detail})" if row.detail else where)

    def lines(self) -> list[str]:
        """The report for a person, one line a reason."""
        out = [f"data: {self.kept} of {self.rows} rows kept from {self.source}"]
        for reason, count in self.dropped.most_common():
            places = self.places[reason][:EXAMPLES]
            more = f" and {count - len(places)} more" if count > len(places) else ""
            out.append(f"  {count} left out: {reason}, at {'; '.join(places)}{more}")
        out += [f"  {count} changed: {change}" for change, count in self.repaired.most_common()]
        return out + [f"  note: {note}" for note in self.notes]
