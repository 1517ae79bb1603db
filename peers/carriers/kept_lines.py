"""A file of lines in a peer's folder, of which the last ones are kept."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from edit.durable_files import sync, write_atomic
from edit.errors import ConfigError, StorageError

__all__ = ["KeptLines"]

_log = logging.getLogger(__name__)


class KeptLines:
    """See above. Make it with `open`. `save` runs in a thread, one call after the other.

    Args:
        most: lines; then the older half goes.
    """

    def __init__(self, path: Path, lines: list[bytes], end: int, most: int) -> None:
        self.path = path
        self._lines, self._end, self._most = lines, end, most
        self._pending: list[bytes] = []
        self._told = False

    @classmethod
    def open(cls, path: Path, most: int) -> KeptLines:
        """Read what is kept; a torn last line is passed over. Raises ConfigError."""
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        end = data.rfind(b"\n") + 1
        return cls(path, data[:end].split(b"\n")[:-1], end, most)

    @property
    def lines(self) -> Sequence[bytes]:
        """Those on disk, without their ends."""
        return self._lines

    def add(self, line: bytes) -> None:
        """Take a line; `save` brings it to the disk."""
        self._pending.append(line)

    async def save(self) -> bool:
        """Bring what was taken to the disk; return whether it is there. What the disk refuses is tried again with the next."""
        pending, self._pending = self._pending, []
        if pending and not await asyncio.to_thread(self._write, pending):
            self._pending = [*pending, *self._pending][-self._most :]
            return False
        return True

    def _write(self, pending: list[bytes]) -> bool:
        """Append these lines; return whether they are on disk."""
        try:
            if len(self._lines) + len(pending) > self._most:
                self._lines = [*self._lines, *pending][-self._most // 2 :]
                data = b"".join(line + b"\n" for line in self._lines)
                write_atomic(self.path, data)
                self._end = len(data)
            else:
                self._append(b"".join(line + b"\n" for line in pending))
                self._lines += pending
        except (OSError, StorageError) as error:
            if not self._told:
                _log.warning("%s: cannot be written (%s); it is tried again with the next receipt", self.path, error)
            self._told = True
            return False
        self._told = False
        return True

    def _append(self, data: bytes) -> None:
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, self._end)
            rest, at = memoryview(data), self._end
            while rest:
                written = os.pwrite(descriptor, rest, at)
                rest, at = rest[written:], at + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync(self.path.parent)
        self._end += len(data)
