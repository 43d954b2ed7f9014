"""What became of the rows and candidates of a sampling run: counted, for `summary.json`, and as tables for people."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rolegraph.algorithms.selection import Selection
from rolegraph.interfaces import FAULT_REASONS

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
QUARTILES = ("min", "25%", "median", "75%", "max")
FAULTS_SHOWN = 8
"""Of the table; `summary.json` has all."""


class Report(Protocol):
    """What became of the rows of a source."""

    @property
    def rows(self) -> int:
        """Rows read."""

    @property
    def dropped(self) -> Counter[str]:
        """Rows left out, by reason."""

    @property
    def places(self) -> dict[str, list[str]]:
        """Where they were, by reason."""

    @property
    def repaired(self) -> Counter[str]:
        """Rows that were read as something that they are not quite, by what that is."""

    @property
    def notes(self) -> list[str]:
        """What else there is to say of the rows."""


class Tally:
    """Counts over the rows of a run; a number of memory a candidate and role, for their distribution."""

    def __init__(self, scorers: Sequence[str] = ()) -> None:
        self.rows = 0
        self.candidates = 0
        self.tokens = 0
        """Of all responses whose length is known."""
        self.passed = 0
        self.kept = 0
        """Responses, or pairs."""
        self.dropped: Counter[str] = Counter()
        """Rows of which nothing is kept, by reason."""
        self.failed: Counter[str] = Counter()
        """Candidates that did not pass, by reason."""
        self.faults: Counter[str] = Counter()
        """Why candidates could not be drawn or scored, by kind."""
        self.fault_examples: dict[str, str] = {}
        """Of each kind the first, with all that was said."""
        self._scores = {role: array("d") for role in scorers}

    def add(self, candidates: Sequence[Mapping[str, Any]], chosen: Selection) -> None:
        """Count one row."""
        self.rows += 1
        self.candidates += len(candidates)
        self.passed += chosen.passed
        self.kept += len(chosen.kept)
        if chosen.dropped is not None:
            self.dropped[chosen.dropped if candidates else "no candidates"] += 1
        self.failed.update(chosen.failed.values())
        for row in candidates:
            self.tokens += row.get("response_length") or 0
            for kind, said in faults_of(row):
                self.faults[kind] += 1
                self.fault_examples.setdefault(kind, said)
            for role, values in self._scores.items():
                score = row.get(f"scores/{role}")
                values.append(np.nan if score is None else score)

    def scores(self) -> dict[str, dict[str, float | int | None]]:
        """Of each role: how many scores there are and how many are null, the least, the quartiles, the largest."""
        found: dict[str, dict[str, float | int | None]] = {}
        for role, values in self._scores.items():
            every = np.asarray(values)
            told = every[np.isfinite(every)]
            cuts = np.quantile(told, (0, 0.25, 0.5, 0.75, 1)) if len(told) else (None,) * 5
            named = {name: None if cut is None else float(cut) for name, cut in zip(QUARTILES, cuts, strict=True)}
            found[role] = {"count": len(told), "null": len(values) - len(told), **named}
        return found


_LONGEST = 80
_EXAMPLE = 300


def faults_of(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The kind of each fault of a candidate, by role, and what was said of it.

    A fault's kind is what comes before its first colon: behind it stand numbers and texts of this candidate.
    """
    for name, role in (("sample_fault", "sampler"), ("prm_fault", "prm")):
        if said := row.get(name):
            yield f"{role}: {_short(said.partition(':')[0], _LONGEST)}", _short(said, _EXAMPLE)
    for name, code in row.items():
        if code and name.startswith("reward_faults/"):
            role, _, function = name.removeprefix("reward_faults/").rpartition("/")
            said = row.get(f"reward_reasons/{role}" if role else "reward_reasons") or ""
            reason = FAULT_REASONS[code - 1] if code <= len(FAULT_REASONS) else "other"
            yield f"{role or 'orm'}: {function}: {reason}", _short(said, _EXAMPLE)


def _short(reason: str, longest: int) -> str:
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return first if len(first) <= longest else first[: longest - 3] + "..."


def as_plain(tally: Tally, report: Report | None, *, drawn: int, tokens: int, seconds: float) -> dict[str, Any]:
    """All of it as JSON has it.

    Args:
        report: what became of the rows of the source.
        drawn: candidates that this part of the run drew, `tokens` theirs, in `seconds`.
    """
    source: dict[str, Any] = {}
    if report is not None:
        source = {"rows": report.rows, "left_out": dict(sorted(report.dropped.items()))}
        source |= {"left_out_at": report.places, "changed": dict(report.repaired), "notes": report.notes}
    return {
        "source": source,
        "rows": tally.rows,
        "candidates": tally.candidates,
        "passed": tally.passed,
        "kept": tally.kept,
        "rows_dropped": dict(tally.dropped.most_common()),
        "candidates_failed": dict(tally.failed.most_common()),
        "faults": dict(tally.faults.most_common()),
        "fault_examples": tally.fault_examples,
        "tokens": tally.tokens,
        "scores": tally.scores(),
        "this_part": {
            "drawn": drawn,
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else None,
        },
    }


def tables_of(summary: Mapping[str, Any], output: str) -> Iterator[Table]:
    """The summary as tables, a header and rows: counts, and the distribution of the scores."""
    rows: list[Sequence[Any]] = []
    source, now = summary["source"], summary["this_part"]
    if source.get("left_out") or source.get("changed"):
        rows.append(("rows of the source", source["rows"]))
        rows += [(f"  left out: {reason}", count) for reason, count in source["left_out"].items()]
    if source.get("changed"):
        rows += [(f"  changed: {change}", count) for change, count in source["changed"].items()]
    rows += [("rows in", summary["rows"]), ("candidates", summary["candidates"]), ("  passed", summary["passed"])]
    rows += [(f"  failed, {reason}", count) for reason, count in summary["candidates_failed"].items()]
    rows += [(f"  fault of {reason}", count) for reason, count in list(summary["faults"].items())[:FAULTS_SHOWN]]
    rows += [(f"rows dropped, {reason}", count) for reason, count in summary["rows_dropped"].items()]
    rows.append(("responses kept" if output == "kept" else "pairs", summary["kept"]))
    if now["drawn"]:
        rows += [("candidates drawn now", now["drawn"]), ("tokens a second", now["tokens_per_second"])]
    yield ("what", "how many"), rows
    if summary["scores"]:
        names = (*QUARTILES, "null")
        yield ("score", *names), [(role, *(cuts[name] for name in names)) for role, cuts in summary["scores"].items()]
