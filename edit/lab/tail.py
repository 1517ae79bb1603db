"""Follow a growing file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["JsonLines"]


class JsonLines:
    """Return the new objects of `path` at each `read`. The file may be missing, end in half a line, or be replaced.

    A finished line that is no JSON object (its writer was killed while writing it, then restarted) is skipped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        self.damaged += 1
        return None
