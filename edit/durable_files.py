"""Files that survive a kill: replaced as a whole, on disk when the call returns, and of a known format.

Every file that a restart depends on is written here, except the journal, which grows by appending. A file that lasts says which
format it has; what lacks a format was written before formats were numbered, and is of format 1. Where a file is read,
`check_format` is the one place where another format is refused, and where an older one would be read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edit.errors import FormatError, StorageError

__all__ = ["check_format", "read_json", "rename", "sync", "write_atomic", "write_atomic_with", "write_json"]


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by these bytes, as `write_atomic_with`."""
    write_atomic_with(path, lambda temporary: temporary.write_bytes(data), mode=mode)


def write_atomic_with(
    path: Path, write: Callable[[Path], object], *, mode: int = 0o644, failures: tuple[type[Exception], ...] = ()
) -> None:
    """Replace `path`: a reader, or a restart after a crash, finds the old or the new content, never a mixture.

    Args:
        path: where the file will be. Its folder exists.
        write: writes the content into the empty file that it is given, which lies beside `path`.
        mode: permissions of the file, less the umask.
        failures: exceptions of `write`, besides OSError, which mean that the disk refused.

    Raises StorageError that names `path`: the content is as before.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        write(temporary)
        sync(temporary)
        rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, *failures)):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise StorageError(f"{path}: cannot be written ({reason})") from error
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder whose content is on disk; the new name is on disk when this returns. Raises OSError."""
    source.replace(target)
    sync(target.parent)


def sync(path: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, values: Mapping[str, object], *, version: int, mode: int = 0o644) -> None:
    """Replace `path` by a JSON object of this format. Raises StorageError."""
    write_atomic(path, json.dumps({"format": version, **values}, indent=1).encode(), mode=mode)


def read_json(path: Path, *, version: int) -> dict[str, Any]:
    """Return the JSON object that `write_json` wrote.

    Raises OSError, ValueError for what is no JSON object, FormatError for another format.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    check_format(path, values.pop("format", 1), version)
    return values


def check_format(file: object, found: object, version: int) -> None:
    """Raise FormatError, one line that names the file and both formats, unless `found` is what this software reads."""
    if found != version:
        raise FormatError(f"{file}: format {found}, this software reads format {version}")
