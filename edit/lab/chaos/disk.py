"""A disk for the coordinator's folder that can be filled: a small tmpfs, or a limit on the sizes of files."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

from edit.errors import StorageError

__all__ = ["BALLAST", "BoundedFiles", "Disk", "SmallDisk", "open_disk"]

BALLAST = ".ballast"  # the file that fills a small disk
_BLOCK = 1 << 16


class Disk(Protocol):
    """A disk that can be filled. `fill` and `free` may be called again; `close` keeps the folder's contents."""

    kind: str  # for people

    def fill(self, pid: int) -> None: ...

    def free(self, pid: int) -> None: ...

    def close(self) -> None: ...


class SmallDisk:
    """A tmpfs at `folder`, which must be empty: writes fail with ENOSPC. Needs the right to mount."""

    kind = "a tmpfs of its own, filled"

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ballast = folder, folder / BALLAST
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "edit-lab-chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StorageError(f"{folder}: cannot be mounted ({done.stderr.strip()})")

    def fill(self, pid: int) -> None:
        """Write until not even one byte fits."""
        with self._ballast.open("ab", buffering=0) as file:
            for block in (bytes(_BLOCK), b"\0"):
                try:
                    while True:
                        file.write(block)
                except OSError:  # the disk is full, as intended
                    continue

    def free(self, pid: int) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        self._ballast.unlink(missing_ok=True)
        kept = self._folder.with_name(f"{self._folder.name}.kept")
        shutil.copytree(self._folder, kept)
        subprocess.run(["umount", str(self._folder)], capture_output=True, check=True)
        self._folder.rmdir()
        kept.rename(self._folder)


class BoundedFiles:
    """RLIMIT_FSIZE of the process: every write beyond `limit` bytes of a file fails with EFBIG, its log included."""

    kind = "RLIMIT_FSIZE of the process"

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit

    def fill(self, pid: int) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._limit, hard))

    def free(self, pid: int) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    def close(self) -> None:
        """Do nothing: the limit ends with the process."""


def open_disk(folder: Path, size: int) -> Disk:
    """Return a tmpfs of `size` bytes where mounting is allowed; else, and for size 0, a limit on the sizes of files."""
    if size == 0:
        return BoundedFiles()
    try:
        return SmallDisk(folder, size)
    except (StorageError, FileNotFoundError, PermissionError):
        return BoundedFiles()
