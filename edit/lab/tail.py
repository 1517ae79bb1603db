"""Follow a growing file of JSON lines."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from aggregator.metrics import file_names

__all__ = ["JsonLines"]


class JsonLines:
    """Return the new objects of `path` at each `read`. The file may be missing, end in half a line, or be replaced.

    What `aggregator.metrics` moved aside is read, too, oldest first: nothing is missed, unless more was written since the last
    call than is kept. A finished line that is no JSON object (its writer was killed while writing it, then restarted) is
    skipped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: tuple[int, int] | None = None  # device and inode of the file that is read
        self._offset = 0
        self._rest = b""
        self.damaged = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects whose lines were finished since the last call, oldest first."""
        new = self._new_bytes()  # first: a replaced file drops the unfinished line of the old one
        *lines, self._rest = (self._rest + new).split(b"\n")
        parsed = [self._parse(line) for line in lines if line.strip()]
        return [value for value in parsed if value is not None]

    def _new_bytes(self) -> bytes:
        """Read on in the file of the last call, then in those that were begun after it."""
        with ExitStack() as stack:
            files = self._open(stack)
            if self._place not in files:  # replaced, or moved aside and removed since
                self._offset, self._rest = 0, b""
            else:
                while next(iter(files)) != self._place:
                    del files[next(iter(files))]
            data = bytearray()
            for place, file in files.items():
                if place != self._place:
                    data += b"\n" if data or self._rest else b""  # a file that ends in half a line ends a line
                    self._place, self._offset = place, 0
                elif file.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                new = file.read()
                data += new
                self._offset += len(new)
        return bytes(data)

    def _open(self, stack: ExitStack) -> dict[tuple[int, int], BinaryIO]:
        """Open what there is, by device and inode, oldest first.

        It is looked for newest first: a file that is moved aside meanwhile is then met twice and not missed.
        """
        found: dict[tuple[int, int], BinaryIO] = {}
        for path in file_names(self._path):
            with suppress(FileNotFoundError):
                file = stack.enter_context(path.open("rb"))
                status = os.fstat(file.fileno())
                found.setdefault((status.st_dev, status.st_ino), file)
        return dict(reversed(found.items()))

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        self.damaged += 1
        return None
