"""Where rows come from: a source yields each row with its place, and a `BadRowError` for one it cannot read."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.data.config import DataConfig
from rolegraph.data.report import BadRowError
from rolegraph.data.rows import Row
from rolegraph.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Place = str
Item = tuple[Place, Row | BadRowError]


def rows_of(config: DataConfig) -> Iterator[Item]:
    """The rows of the configured source, in its order, each with the place to name in a report (`file:line`).

    Raises:
        DataError: the source is not there, or not what its kind says.
    """
    problems = config.problems()
    if problems:
        raise DataError("; ".join(problems))
    assert config.source is not None
    return _SOURCES[config.source](config)


def _jsonl(config: DataConfig) -> Iterator[Item]:
    for file in files(config.path, (".jsonl", ".jsonl.gz", ".json", ".ndjson")):
        opener: Callable[[Path], Any] = gzip.open if file.suffix == ".gz" else (lambda path: path.open("rb"))
        with opener(file) as lines:
            try:
                for number, line in enumerate(_lines(lines), 1):
                    # Files that were put behind each other have a byte-order mark in the middle.
                    text = line.removeprefix(b"\xef\xbb\xbf")
                    if text.strip():
                        yield f"{file}:{number}", _parse(text)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{file} cannot be read: {error}") from error


_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",  # before that of UTF-16, which it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the byte-order mark that a file begins with."""


def _lines(file: Any) -> Iterator[bytes]:
    """Lines in UTF-8. Only \\n ends one: U+2028 and friends are text."""
    head = file.peek(4)[:4]
    wide = next((encoding for mark, encoding in _WIDE.items() if head.startswith(mark)), None)
    if wide is None:
        yield from file
        return
    for line in io.TextIOWrapper(file, encoding=wide, newline="\n", errors="replace"):
        yield line.encode()


def _parse(line: bytes) -> Row | BadRowError:
    try:
        row = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRowError("not UTF-8", f"byte {error.start + 1}: {error.reason}")
    except json.JSONDecodeError as error:
        if line.strip() == b"[" or line.lstrip().startswith(b"[{"):
            return BadRowError("broken JSON", "the file looks like one JSON array: write one object a line")
        return BadRowError("broken JSON", f"column {error.colno}: {error.msg}")
    except (RecursionError, ValueError) as error:
        return BadRowError("broken JSON", str(error))
    if not isinstance(row, dict):
        return BadRowError("not a JSON object", f"it is of type {type(row).__name__}")
    return row


def _parquet(config: DataConfig) -> Iterator[Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files(config.path, (".parquet", ".pq")):
        number = 0
        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=1024):
                    for row in _readable(batch):
                        number += 1
                        yield f"{file}:{number}", row
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise DataError(f"{file} cannot be read as Parquet after row {number}: {error}") from error


def _readable(batch: pa.RecordBatch) -> Iterator[Row | BadRowError]:
    """The rows of a batch; one with a value that Python cannot hold keeps the others from nothing."""
    try:
        rows = batch.to_pylist()
    except ValueError:  # text that is no UTF-8, times out of range
        rows = None
    if rows is not None:
        yield from rows
        return
    for index in range(len(batch)):
        row = batch.slice(index, 1)
        try:
            yield row.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRowError("not UTF-8", f"byte {error.start + 1} of a text: {error.reason}")
        except ValueError as error:
            yield BadRowError("a value that cannot be read", str(error))


def _huggingface(config: DataConfig) -> Iterator[Item]:
    assert isinstance(config.path, str)
    try:
        data = _load_huggingface(config)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises a dozen kinds, from ValueError to those of the hub
        hint = "" if Path(config.path).exists() else "; it is no folder here, so it must be on the hub or in its cache"
        raise DataError(
            f"data.path={config.path!r} (name={config.name}, split={config.split}) cannot be loaded: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    for number, row in enumerate(data, 1):
        yield f"{config.path}[{config.split}]:{number}", dict(row)


def _load_huggingface(config: DataConfig) -> Any:
    import datasets

    folder = Path(str(config.path)).expanduser()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    if not saved:
        path = str(folder) if folder.exists() else str(config.path)
        return datasets.load_dataset(path, config.name, split=config.split, revision=config.revision)
    for key in ("name", "revision"):
        if getattr(config, key) is not None:
            raise DataError(f"data.{key} is for a dataset on the hub, and {folder} is a saved one: remove it")
    data = datasets.load_from_disk(str(folder))
    if not isinstance(data, dict):
        return data
    if config.split not in data:
        raise DataError(f"data.split={config.split!r} is not in {folder}, which has {', '.join(data)}")
    return data[config.split]


def _reasoning_gym(config: DataConfig) -> Iterator[Item]:
    from rolegraph.data.reasoning import rows_of_task

    return rows_of_task(config)


def files(path: str | tuple[str, ...] | None, endings: tuple[str, ...]) -> list[Path]:
    """The files that a path, a folder, a glob pattern or a list of these names, each once, folders sorted by name.

    Raises:
        DataError: a name matches nothing.
    """
    found: dict[Path, None] = {}
    for name in (path,) if isinstance(path, str) else path or ():
        whole = Path(name).expanduser()
        if whole.is_file():
            matches = [whole]
        elif whole.is_dir():
            matches = sorted(file for file in whole.iterdir() if file.name.endswith(endings) and file.is_file())
        else:
            found_names = glob.glob(str(whole), recursive=True)  # noqa: PTH207 - patterns may be absolute
            matches = sorted(Path(match) for match in found_names if Path(match).is_file())
        if not matches:
            what = f"a folder without {' or '.join(endings)} files" if whole.is_dir() else "not there"
            raise DataError(f"data.path={name!r} is {what} (looked in {Path.cwd()})")
        found.update(dict.fromkeys(matches))
    return list(found)


_SOURCES: dict[str, Callable[[DataConfig], Iterator[Item]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "huggingface": _huggingface,
    "reasoning_gym": _reasoning_gym,
}
