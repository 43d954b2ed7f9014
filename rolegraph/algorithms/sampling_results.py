"""What a sampling run writes: candidates as they come, results as rows are complete, all of it in order at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolegraph.algorithms.sampling_folder import source_of
from rolegraph.algorithms.sampling_summary import Tally
from rolegraph.algorithms.selection import Candidate, Rules, Selection, select
from rolegraph.batch import Batch
from rolegraph.errors import DataError
from rolegraph.journal import Journal, Key
from rolegraph.json_rows import EXACT, Row, decode, encode_plain
from rolegraph.results import write_jsonl, write_parquet

SAMPLE = ("uid", "repeat", "response_text", "finish_reason", "response_length", "sample_fault")
"""What is written of a draw."""
OWN = frozenset(
    {
        *("uid", "repeat", "messages", "response", "score", "scores"),
        *("rejected_response", "rejected_repeat", "rejected_score", "rejected_scores"),
    }
)
"""Columns of results that are not the dataset's: one of its own of such a name has `dataset_` before it."""
NOT_PASSED_ON = frozenset(
    {
        *("uid", "prompt_ids", "prompt_length", "teacher_prompt_ids", "teacher_prompt_length"),
        *("response_ids", "response_mask", "response_length", "length"),
    }
)
"""What the loader made of a row: its tokens, for one model."""
_CHUNK = 256
"""Rows of the dataset that are looked at together."""


@dataclass(frozen=True)
class Part:
    """Some rows of the dataset, and what each of them lacks."""

    rows: tuple[int, ...]
    """Their places in the dataset."""
    draw: tuple[tuple[int, ...], ...]
    """Of each row, the repeats that are not drawn yet."""
    drawn: tuple[Key, ...]
    """Candidates that are drawn and not scored."""

    @property
    def to_draw(self) -> int:
        """Candidates that are not drawn yet."""
        return sum(map(len, self.draw))


def parts_of(
    rows: Iterable[tuple[int, str]],
    repeats: Mapping[str, Sequence[int]] | int,
    size: int,
    drawn: Collection[Key],
    scored: Collection[Key],
) -> Iterator[Part]:
    """The work that is left, `size` rows at a time; rows that lack nothing are in no part.

    Args:
        rows: place and uid of each row.
        repeats: how many candidates a row has, or which, by uid.
    """
    open_rows: list[tuple[int, tuple[int, ...], list[Key]]] = []
    for place, uid in rows:
        keys = [(uid, repeat) for repeat in repeats_of(repeats, uid)]
        if left := [key for key in keys if key not in scored]:
            missing = tuple(repeat for uid, repeat in left if (uid, repeat) not in drawn)
            open_rows.append((place, missing, [key for key in left if key in drawn]))
        if len(open_rows) == size:
            yield _part(open_rows)
            open_rows = []
    if open_rows:
        yield _part(open_rows)


def _part(rows: Sequence[tuple[int, tuple[int, ...], list[Key]]]) -> Part:
    places, draw, drawn = zip(*rows, strict=True)
    return Part(places, draw, tuple(key for keys in drawn for key in keys))


def repeats_of(repeats: Mapping[str, Sequence[int]] | int, uid: str) -> Sequence[int]:
    """The candidates of a row."""
    return range(repeats) if isinstance(repeats, int) else repeats.get(uid, ())


def cached(path: Path, uids: Collection[str]) -> tuple[Journal, dict[str, list[int]]]:
    """The candidates of an earlier run, and which each of these rows has. Raises DataError where none has any."""
    journal = Journal(source_of(str(path)), read_only=True)
    known, found = set(uids), dict[str, list[int]]()
    for uid, repeat in sorted(journal.keys):
        if uid in known:
            found.setdefault(uid, []).append(repeat)
    if not found:
        first = next(iter(journal.keys), ("none", 0))[0]
        raise DataError(
            f"algorithm.candidates={path} has no candidate of any row of this data ({len(journal)} candidates; the uid "
            f"of the first: {first}): give the data of the run that drew them"
        )
    return journal, found


class Results:
    """The files of a run. One thread at a time may call it.

    Args:
        rows: all rows of the dataset; `places` are those of this run, in order.
        repeats: how many candidates a row has, or which, by uid.
    """

    def __init__(
        self,
        folder: Path,
        rows: Batch,
        places: Sequence[int],
        repeats: Mapping[str, Sequence[int]] | int,
        rules: Rules,
        samples: Journal | None = None,
    ) -> None:
        self.folder, self.rules, self.repeats = folder, rules, repeats
        self.samples = samples or Journal(folder / "samples.jsonl")
        self.candidates = Journal(folder / "candidates.jsonl")
        self.path = folder / f"{rules.output}.jsonl"
        self._rows, self._places = rows, places
        uids = rows["uid"].to_pylist()
        self.uids = [uids[place] for place in places]
        self._uid_of = dict(zip(places, self.uids, strict=True))
        self._passed_on = rows.drop(NOT_PASSED_ON)
        self.scorers = sorted(rules.weights)

    def uid_of(self, place: int) -> str:
        """The uid of a dataset row."""
        return self._uid_of[place]

    def parts(self, size: int) -> Iterator[Part]:
        """The work that is left when this is called."""
        rows = zip(self._places, self.uids, strict=True)
        return parts_of(rows, self.repeats, size, self.samples.keys, self.candidates.keys)

    def begin(self) -> None:
        """Write the results of the rows that an earlier part of the run completed; later ones are added to them."""
        write_jsonl(self.path, self._results(self._complete(), Tally(self.scorers)))

    def add(self, part: Part, candidates: Sequence[Row]) -> None:
        """Write the last candidates of some rows, and the results of these rows."""
        self.candidates.append(candidates)
        lines = [encode_plain(row)[0] + b"\n" for row in self._results(part.rows, Tally(self.scorers))]
        with self.path.open("ab") as file:
            file.writelines(lines)

    def finish(self) -> tuple[Tally, list[str]]:
        """Write all results anew, in the order of the data; returns what became of the rows, and notes."""
        from rolegraph.data.column_types import ColumnTypes

        tally, types = Tally(self.scorers), ColumnTypes(("uid", "repeat", "messages"))
        lost = write_jsonl(self.path, types.watch(self._results(self._places, tally)))
        notes = [
            f"{self.path.name}: {name} held NaN or infinite numbers in {count} rows, written as null"
            for name, count in lost.items()
        ]

        def again() -> Iterator[Row]:
            return self._results(self._places, Tally(self.scorers))

        return tally, notes + write_parquet(self.path.with_suffix(".parquet"), again, types)

    def close(self) -> None:
        """Close the journals."""
        self.samples.close()
        self.candidates.close()

    def _complete(self) -> Iterator[int]:
        scored = self.candidates.keys
        for place, uid in self._uid_of.items():
            if all((uid, repeat) in scored for repeat in repeats_of(self.repeats, uid)):
                yield place

    def _results(self, places: Iterable[int], tally: Tally) -> Iterator[Row]:
        """The result rows of these dataset rows, in order; what becomes of them is counted."""
        chunk: list[tuple[int, dict[int, Row], Selection]] = []
        for place in places:
            uid = self._uid_of[place]
            keys = [(uid, repeat) for repeat in repeats_of(self.repeats, uid)]
            found = {row["repeat"]: row for row in self.candidates.read(keys)}
            chosen = select([candidate_of(row, self.scorers) for row in found.values()], self.rules)
            tally.add(list(found.values()), chosen)
            if chosen.kept:
                chunk.append((place, found, chosen))
            if len(chunk) == _CHUNK:
                yield from self._chunk(chunk)
                chunk = []
        yield from self._chunk(chunk)

    def _chunk(self, chunk: Sequence[tuple[int, dict[int, Row], Selection]]) -> Iterator[Row]:
        if not chunk:
            return
        columns = self._passed_on.take([place for place, _, _ in chunk]).fetch_sync()
        for row, (place, found, chosen) in zip(columns.table.to_pylist(), chunk, strict=True):
            if exact := row.pop(EXACT, None):
                row |= decode(exact.encode())
            yield from result_rows(self._uid_of[place], row, found, chosen, self.scorers)


def candidate_of(row: Row, scorers: Sequence[str]) -> Candidate:
    """A candidate as selection sees it, of its line in the journal."""
    text = row.get("response_text")
    scores = {role: row.get(f"scores/{role}") for role in scorers}
    return Candidate(row["repeat"], scores, answered=isinstance(text, str) and bool(text.strip()))


def result_rows(
    uid: str, columns: Row, candidates: Mapping[int, Row], chosen: Selection, scorers: Sequence[str]
) -> Iterator[Row]:
    """The lines of a row's results: `messages` that end with the response, else `prompt` and `response`.

    A pair has the rejected one as `rejected_response`. The dataset's own columns follow.
    """
    rest = {f"dataset_{name}" if name in OWN else name: value for name, value in columns.items() if name != "messages"}

    def scores(repeat: int) -> dict[str, Any]:
        return {role: candidates[repeat].get(f"scores/{role}") for role in scorers}

    for repeat in chosen.kept:
        row: Row = {"uid": uid, "repeat": repeat}
        text = candidates[repeat]["response_text"]
        if columns.get("messages") is not None:
            # Arrow gives every message the keys of all messages: absent ones come as null.
            asked = [{key: value for key, value in turn.items() if value is not None} for turn in columns["messages"]]
            row["messages"] = [*asked, {"role": "assistant", "content": text}]
        else:
            row["response"] = text
        if chosen.rejected is not None:
            row["rejected_response"] = candidates[chosen.rejected]["response_text"]
            row["rejected_repeat"] = chosen.rejected
        if scorers:
            row |= {"score": chosen.totals[repeat], "scores": scores(repeat)}
        if scorers and chosen.rejected is not None:
            row |= {"rejected_score": chosen.totals[chosen.rejected], "rejected_scores": scores(chosen.rejected)}
        yield row | rest
