"""Files of results: whole, or as they were before, whenever the run is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.errors import ConfigError
from rolegraph.json_rows import encode_plain

if TYPE_CHECKING:
    from rolegraph.data.column_types import ColumnTypes


def lock(file: int) -> bool:
    """Keep other processes from an open file; False where one has it. Ends when this process closes a handle on it."""
    # A lock of the process, which its death gives back; one of the file (flock) would live on in forked children.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # some network file systems have no locks
        pass
    return True


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep the runs of other processes out of a folder, which is made. Raises ConfigError where one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not lock(file):
            raise ConfigError(
                f"output_dir={folder} is being written by a run that still goes on: wait for its end, or choose "
                "another folder"
            )
        yield
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Make names that were made or changed in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems cannot, and need not
        pass
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place when the block ends well: whole, or as it was before."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        handle = os.open(part, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object in a file, whole or not there."""
    with replacing(path) as part:
        part.write_text(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Rows as JSONL for other programs (`json_rows.encode_plain`), whole or not there.

    Returns in how many rows a NaN or an infinity became null, by column.
    """
    lost: Counter[str] = Counter()
    with replacing(path) as part, part.open("wb") as file:
        for row in rows:
            line, columns = encode_plain(row)
            file.write(line + b"\n")
            lost.update(columns)
    return lost


def write_parquet(path: Path, rows: Callable[[], Iterable[Mapping[str, Any]]], types: ColumnTypes) -> list[str]:
    """Rows as Parquet, whole or not there, a row group at a time.

    Args:
        rows: gives them, the same each time it is called.
        types: has watched them.

    Returns notes on columns whose values were of several types and are carried as text, each with the file's name.
    """
    import pyarrow.parquet as pq

    from rolegraph.data.column_types import MisfitError, chunks

    while True:
        with contextlib.suppress(MisfitError), replacing(path) as part:
            with pq.ParquetWriter(part, types.schema) as writer:
                for chunk in chunks(rows()):
                    writer.write_table(types.table(chunk))
            break
    return [f"{path.name}: {note}" for note in types.notes]
