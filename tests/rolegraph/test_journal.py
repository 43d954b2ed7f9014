"""Journals that are cut anywhere, written twice, broken, or on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolegraph.errors import DataError
from rolegraph.journal import Journal

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
contents = st.lists(st.dictionaries(texts.filter(lambda name: name not in ("uid", "repeat")), texts), max_size=4)


def _row(uid: str, repeat: int = 0, **columns: Any) -> dict[str, Any]:
    return {"uid": uid, "repeat": repeat, **columns}


@settings(deadline=None, max_examples=50)
@given(contents, st.data())
def test_cut_at_any_byte_whole_lines_stay_and_the_rest_is_written_again(
    columns: list[dict[str, str]], data: st.DataObject
) -> None:
    rows = [_row("ü", number, **row) for number, row in enumerate(columns)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        journal = Journal(path)
        journal.append(rows)
        journal.close()
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        os.truncate(path, cut)
        again = Journal(path)
        kept = whole[:cut].count(b"\n")
        assert list(again.read()) == rows[:kept]
        assert again.torn == (not whole[:cut].endswith(b"\n") and cut > 0)
        again.append(row for row in rows if (row["uid"], row["repeat"]) not in again.keys)
        again.close()
        assert path.read_bytes() == whole


def test_rows_are_found_by_key(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    long = "x" * 100_000
    journal.append([_row("b", 1, text="b1"), _row("a", 0, text=long)])
    journal.append([_row("b", 0, text="b0")])
    journal.append([])
    assert journal.keys == {("b", 1), ("a", 0), ("b", 0)}
    assert len(journal) == 3
    assert [row["text"] for row in journal.read([("b", 0), ("a", 0)])] == ["b0", long]
    with pytest.raises(KeyError):
        next(journal.read([("c", 0)]))
    journal.close()
    assert [row["text"] for row in Journal(journal.path).read([("b", 1), ("b", 0)])] == ["b1", "b0"]


def test_a_journal_is_closed_between_appends_never_within_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, other = Journal(tmp_path / "rows.jsonl"), tmp_path / "other"
    writing, go_on, write = threading.Event(), threading.Event(), os.write

    def slow(file: int, data: bytes) -> int:
        writing.set()
        go_on.wait(5)
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    appending = threading.Thread(target=journal.append, args=([_row("a")],))
    closing = threading.Thread(target=journal.close)
    appending.start()
    assert writing.wait(5)
    closing.start()
    closing.join(0.2)
    handle = os.open(other, os.O_RDWR | os.O_CREAT)  # takes the number of a file that was closed meanwhile
    go_on.set()
    appending.join(5)
    closing.join(5)
    os.close(handle)
    assert journal.path.read_bytes() == b'{"uid": "a", "repeat": 0}\n'
    assert other.read_bytes() == b""


def test_a_key_is_written_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    journal.append([_row("a")])
    for rows in ([_row("b"), _row("a")], [_row("c"), _row("c")]):
        with pytest.raises(DataError, match=r"rows.jsonl: uid '[ac]' repeat 0 is there already"):
            journal.append(rows)
    assert journal.keys == {("a", 0)}
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes() * 2)
    with pytest.raises(DataError, match=r"rows.jsonl:2: uid 'a' repeat 0 is there already: remove one"):
        Journal(journal.path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"uid": "x", "repe', "Unterminated string"),
        (b"[1]", "not a JSON object"),
        (b"", "Expecting value"),
        (b'{"uid": "x"}', "a number `repeat` from 0, not by 'x' and None"),
        (b'{"uid": 7, "repeat": 0}', "not by 7 and 0"),
        (b'{"uid": "x", "repeat": true}', "not by 'x' and True"),
        (b'{"uid": "x", "repeat": -1}', "not by 'x' and -1"),
        (b'{"uid": "\xff", "repeat": 1}', "utf-8"),
        (b"[" * 100_000, "RecursionError"),
        (b'{"uid": "x", "repeat": 0, "n": {"$decimal": "many"}}', "InvalidOperation"),
    ],
)
def test_a_broken_line_before_the_last_is_an_error_that_names_it(tmp_path: Path, line: bytes, what: str) -> None:
    path = tmp_path / "rows.jsonl"
    whole = b'{"uid": "a", "repeat": 0}\n' + line + b'\n{"uid": "b", "repeat": 0}\n'
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: broken line: .*resume=true") as caught:
        Journal(path)
    assert what in str(caught.value)
    assert path.read_bytes() == whole  # nothing is lost to a journal that cannot be read


def test_what_cannot_be_written_names_the_column_and_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    for value, why in ((object(), "a object has no form"), ("\ud83d", "surrogates"), ({1: 2}, "key 1 is no text")):
        with pytest.raises(DataError, match=rf"column 'odd' of uid 'b' cannot be written as JSON: .*{why}"):
            journal.append([_row("a"), _row("b", odd=[value, float("nan")])])
    assert not journal.keys
    assert not journal.path.read_bytes()


def test_a_full_disk_is_an_error_and_the_journal_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    journal.append([_row("a")])
    before, write = journal.path.read_bytes(), os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DataError, match=r"rows.jsonl cannot be written: No space left on device"):
            journal.append([_row("b", text="long enough to be written in several pieces")])
    assert journal.path.read_bytes() == before
    journal.append([_row("b")])
    assert [row["uid"] for row in journal.read()] == ["a", "b"]


def test_a_second_process_is_kept_away_and_a_reader_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.append([_row("a")])
    assert list(journal.read([("a", 0)]))  # reading must not end the lock
    code = f"from pathlib import Path; from rolegraph.journal import Journal; Journal(Path({str(path)!r}))"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "rows.jsonl is being written by another process" in second.stderr
    reading = code.removesuffix(")") + ", read_only=True)"
    assert subprocess.run([sys.executable, "-c", reading], check=False).returncode == 0
    journal.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"uid": "a", "repeat": 0}\n{"uid": "b", "re')
    before = path.read_bytes()
    reader = Journal(path, read_only=True)
    assert reader.torn
    assert reader.keys == {("a", 0)}
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="opened to be read"):
        reader.append([_row("c")])
    with pytest.raises(DataError, match=r"no\.jsonl cannot be opened: No such file"):
        Journal(tmp_path / "no.jsonl", read_only=True)


WRITER = """
import sys
from pathlib import Path
from rolegraph.journal import Journal
journal = Journal(Path(sys.argv[1]))
for number in range(len(journal), 10**6):
    journal.append([{"uid": str(number), "repeat": repeat, "text": "x" * number} for repeat in range(3)])
    print(number, flush=True)
"""


def test_what_append_has_returned_from_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        said = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    said = max([said, *map(int, process.stdout.read().split())])
    process.wait()
    journal = Journal(path)
    assert {(str(number), repeat) for number in range(said + 1) for repeat in range(3)} <= journal.keys
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
