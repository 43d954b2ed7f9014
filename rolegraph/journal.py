"""The journal of a run: rows as they come, in a file that the run can be killed beside and goes on from.

It is JSONL, a row a line, named by (`uid`, `repeat`); `json_rows` says what becomes of values JSON has no form for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

from rolegraph.errors import DataError
from rolegraph.json_rows import Row, decode, encode
from rolegraph.results import lock, sync_folder

Key = tuple[str, int]

_CHUNK = 1 << 20
"""Bytes read at once."""


class Journal:
    """Rows of a run, written as they come; what `append` has returned from outlives kill -9 and a power cut.

    >>> journal = Journal(Path("samples.jsonl"))                       # doctest: +SKIP
    >>> journal.append([{"uid": "a", "repeat": 0, "text": "4"}])       # doctest: +SKIP
    >>> ("a", 0) in journal.keys                                       # doctest: +SKIP
    True

    Memory holds the keys, and where each row begins. Calls may come from any thread.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open a journal, or begin one; a last line that was cut short is taken off, or passed over with `read_only`.

        Raises:
            DataError: another process writes it, another line is broken, a key is there twice, or (with `read_only`)
                there is no such file.
        """
        self.path = path
        self.torn = False
        """Whether the last line was cut short, as by a kill while it was written."""
        self._read_only = read_only
        self._lock = threading.Lock()
        self._places: dict[Key, int] = {}
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
        is_new = not path.exists()
        try:
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            if not read_only:
                self._take(is_new)
            self._size = self._open()
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, is_new: bool) -> None:
        if not lock(self._file):
            raise DataError(f"{self.path} is being written by another process: wait for it, or end it first")
        if is_new:
            sync_folder(self.path.parent)

    def _open(self) -> int:
        """Learn the keys; returns the bytes of the whole lines."""
        end = 0
        for number, (place, line) in enumerate(self._lines(), 1):
            where = f"{self.path}:{number}"
            try:
                key = key_of(decode(line))
            except (DataError, ValueError) as error:
                raise DataError(
                    f"{where}: broken line: {error}. Remove it, and what it held is made again by resume=true"
                ) from error
            if key in self._places:
                raise DataError(f"{where}: uid {key[0]!r} repeat {key[1]} is there already: remove one of the lines")
            self._places[key] = place
            end = place + len(line) + 1
        self.torn = os.fstat(self._file).st_size > end
        if self.torn and not self._read_only:
            os.ftruncate(self._file, end)
            os.fsync(self._file)
        return end

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Where each whole line begins, and its bytes."""
        # Read at places of the one file: closing a second one would end the lock.
        place, rest = 0, b""
        while chunk := os.pread(self._file, _CHUNK, place + len(rest)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield place, line
                place += len(line) + 1

    @property
    def keys(self) -> KeysView[Key]:
        """`(uid, repeat)` of every row, a set that grows with `append`."""
        return self._places.keys()

    def __len__(self) -> int:
        return len(self._places)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows in one go, all of them on the disk when this returns; none is written where this raises.

        Raises:
            DataError: a key is there already or is none, a value cannot be written (the column is named), or the disk
                does not take it.
        """
        if self._read_only:
            raise DataError(f"{self.path} was opened to be read")
        lines = [(key_of(row), encode(row)) for row in rows]
        if not lines:
            return
        with self._lock:
            places: dict[Key, int] = {}
            end = self._size
            for key, line in lines:
                if key in self._places or key in places:
                    raise DataError(f"{self.path}: uid {key[0]!r} repeat {key[1]} is there already")
                places[key] = end
                end += len(line) + 1
            self._write(b"".join(line + b"\n" for _, line in lines))
            self._size = end
            self._places |= places

    def _write(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # what is torn is taken off here or at the next opening
                os.ftruncate(self._file, self._size)
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error

    def read(self, keys: Iterable[Key] | None = None) -> Iterator[Row]:
        """The rows of these keys in their order, or all as they were written. Raises KeyError for an absent key."""
        if keys is None:
            for _, line in self._lines():
                yield decode(line)
            return
        for key in keys:
            yield decode(self._line(self._places[key]))

    def _line(self, place: int) -> bytes:
        parts: list[bytes] = []
        while chunk := os.pread(self._file, 1 << 14, place):
            head, newline, _ = chunk.partition(b"\n")
            parts.append(head)
            if newline:
                break
            place += len(chunk)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file, once what is being appended is written; another process may open it."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def key_of(row: Mapping[str, Any]) -> Key:
    """`(uid, repeat)` of a row. Raises DataError where these are no text and no number from 0."""
    uid, repeat = row.get("uid"), row.get("repeat")
    if not isinstance(uid, str) or isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 0:
        raise DataError(f"a row is named by a text `uid` and a number `repeat` from 0, not by {uid!r} and {repeat!r}")
    return uid, repeat
