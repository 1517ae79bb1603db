"""A disk that fills up in the midst of a write."""

from __future__ import annotations

import errno
import os

import pytest

__all__ = ["FullDisk"]


class FullDisk:
    """Stands in for os.write. room: bytes that still fit; None: any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Write what fits. Raises OSError where nothing does."""
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, memoryview(data)[: self.room])
        self.room -= written
        return written
