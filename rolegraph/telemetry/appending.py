"""`Appender`: a file that grows by whole pieces, also on a disk that is full for a while."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Appender:
    """Adds text to the end of a file, all of it or nothing; what it has added outlives a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = os.fstat(self._file).st_size
        self._is_torn = False

    def append(self, text: str) -> OSError | None:
        """Why it could not be added; null where it was. What the disk took of it is taken off again."""
        try:
            if self._is_torn:
                self.cut(self._size)
            data = text.encode()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._is_torn = True
            with contextlib.suppress(OSError):  # else before the next piece
                self.cut(self._size)
            return error
        self._size += len(data)
        return None

    def cut(self, size: int) -> None:
        """Keep the first bytes alone. Raises OSError."""
        os.ftruncate(self._file, size)
        self._size, self._is_torn = size, False

    def sync(self) -> None:
        """Have on the disk what was added. Raises OSError."""
        os.fsync(self._file)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be added any more."""
        return self._file < 0

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
