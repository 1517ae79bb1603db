"""A file of lines that is only appended to, as the logs on disk are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from aggregator.storage.journal import Disk
from edit.durable_files import sync
from edit.errors import StorageError

__all__ = ["LineFile"]


class LineFile:
    """See above. `read` it before anything is appended. Used by one thread at a time.

    disk: what writes, or what a test has in its place.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self._disk = path, disk
        self._descriptor = -1
        self._end = 0  # the file up to here is whole, and on disk
        self._torn = False  # bytes behind it could not be cut off

    @property
    def is_open(self) -> bool:
        """Whether it was read, and not closed."""
        return self._descriptor >= 0

    def read(self, take: Callable[[bytes], None]) -> None:
        """Open the file, and make it if there is none. Hand over each whole line, without its end; cut off a torn one.

        Raises StorageError, and what `take` raises.
        """
        new = not self.path.exists()
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            if new:
                sync(self.path.parent, self._disk.fsync)
            self._end = 0
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):  # a killed process was writing it
                        break
                    take(line[:-1])
                    self._end += len(line)
            os.ftruncate(self._descriptor, self._end)
            self._disk.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be opened ({error.strerror})") from error

    def append(self, line: bytes) -> None:
        """Write a line, given without its end; it is on disk when this returns. Raises StorageError: it is not there."""
        self._mend()
        data = line + b"\n"
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._disk.write(self._descriptor, rest) :]
            self._disk.fsync(self._descriptor)
        except Exception as error:
            self._torn = True
            if isinstance(error, OSError):
                raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error
            raise
        self._end += len(data)

    def take_back(self, line: bytes) -> None:
        """Cut off the last line, which is this one. Raises StorageError."""
        self._end -= len(line) + 1
        self._torn = True
        self._mend()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _mend(self) -> None:
        """Cut off what a failed write has left. Raises StorageError."""
        if not self._torn:
            return
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            raise StorageError(f"{self.path}: bytes behind {self._end} cannot be cut off ({error.strerror})") from error
        self._torn = False
