"""Files that survive a kill: replaced as a whole, on disk when the call returns, and of a known format.

Every file that a restart depends on is written here, except the journal, which grows by appending. A file that lasts says which
format it has; what lacks a format was written before formats were numbered, and is of format 1. Where a file is read,
`check_format` is the one place where another format is refused, and where an older one would be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from edit.errors import ConfigError, FormatError, StorageError
from edit.plain_text import parse_json, reason_of

__all__ = [
    "append_whole",
    "check_format",
    "check_outside",
    "hidden_prefix",
    "lock_file",
    "make_folder",
    "names_in",
    "read_json",
    "read_private",
    "rename",
    "sync",
    "write_atomic",
    "write_atomic_with",
    "write_json",
]

_LONGEST = 200  # bytes of a name of at most 255
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW  # no file that was there, and none behind a link


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, shared: bool = False) -> None:
    """Replace `path` by these bytes, as `write_atomic_with`."""
    _replace(path, lambda _, descriptor: _write_all(descriptor, data), mode, (), shared=shared)


def write_atomic_with(
    path: Path,
    write: Callable[[Path], object],
    *,
    mode: int = 0o644,
    failures: tuple[type[Exception], ...] = (),
    shared: bool = False,
) -> None:
    """Replace `path`: a reader, or a restart after a crash, finds the old or the new content, never a mixture.

    Args:
        path: where the file will be. Its folder exists.
        write: writes the content into the empty file that it is given, which lies beside `path`.
        mode: permissions of the file, less the umask.
        failures: exceptions of `write`, besides OSError, which mean that the disk refused.
        shared: a user has named `path`, and another process may write it at the same time: the last one to end counts. The
            temporary file beside `path` has a random name, and stays after a kill; else the next write removes it.

    Raises StorageError that names `path`: the content is as before; or it is the new one, where only the folder's list of names
    could not be synced. A device or a pipe is not replaced; a link is, and what it leads to stays.
    """
    _replace(path, lambda temporary, _: write(temporary), mode, failures, shared=shared)


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    """Return the names in a folder that match a pattern of the shell, sorted; none where there is no folder.

    Raises StorageError where they cannot be read.
    """
    try:
        return sorted(path.name for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
    except FileNotFoundError:
        return []
    except OSError as error:  # not as `Path.glob`, to which a folder that may not be read is an empty one
        raise StorageError(f"{folder}: cannot be read ({error.strerror})") from error


def hidden_prefix(path: Path) -> str:
    """Return the beginning of a hidden temporary name beside `path`, with room for some more letters."""
    return f".{os.fsdecode(os.fsencode(path.name)[:_LONGEST])}."


def _replace(
    path: Path, write: Callable[[Path, int], object], mode: int, failures: tuple[type[Exception], ...], *, shared: bool
) -> None:
    """See `write_atomic_with`. write: is given the empty file's path, and a descriptor of it."""
    if not path.name:
        raise StorageError(f"{path}: is a folder; name a file")
    temporary = path.with_name(f"{hidden_prefix(path)}{secrets.token_hex(4)}.tmp" if shared else f".{path.name}.tmp")
    try:
        _check_replaceable(path)
        if not shared:
            temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, _NEW_FILE, mode)
        try:
            write(temporary, descriptor)
            _check_ours(temporary, os.fstat(descriptor))
        finally:
            os.close(descriptor)
        sync(temporary)
        rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, *failures)):
            raise StorageError(f"{path}: cannot be written ({reason_of(error)})") from error
        raise


def _check_replaceable(path: Path) -> None:
    """Raise StorageError where a device or a pipe lies: root could replace it. Raises OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise StorageError(f"{path}: is no regular file; name a file")


def _check_ours(temporary: Path, created: os.stat_result) -> None:
    """Raise OSError unless what lies there is a file of this user; give it the permissions that the file had when `created`.

    A writer may have put another file there (safetensors does), but not a link, and nobody else may.
    """
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != created.st_uid:
            raise OSError(errno.EPERM, f"somebody else put {temporary.name} there")
        if found.st_mode != created.st_mode:
            os.fchmod(descriptor, stat.S_IMODE(created.st_mode))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def append_whole(descriptor: int, data: bytes) -> None:
    """Append to a file that was opened for that; it is not synced. For files that nothing depends on, as metrics.

    Raises OSError: nothing of `data` is left in the file. A pipe or a device keeps what it took.
    """
    end = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, data)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder whose content is on disk; the new name is on disk when this returns.

    Raises OSError: it may be renamed yet, where only the new name could not be synced.
    """
    source.replace(target)
    sync(target.parent)


def sync(path: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder that need not be there yet, in one that is: a folder that was taken away does not come back as a new one.

    mode: permissions, less the umask. Raises StorageError.
    """
    try:
        path.mkdir(mode, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be created ({error.strerror})") from error


def lock_file(descriptor: int, path: Path) -> bool:
    """Lock an open file for this process, until the descriptor is closed; return False where another process has the lock.

    Raises StorageError that names `path` where its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StorageError(
            f"{path}: its file system has no locks ({error.strerror}); put the folder on a local disk"
        ) from error
    return True


def write_json(path: Path, values: Mapping[str, object], *, version: int, mode: int = 0o644) -> None:
    """Replace `path` by a JSON object of this format. Raises StorageError."""
    write_atomic(path, json.dumps({"format": version, **values}, indent=1).encode(), mode=mode)


def read_json(path: Path, *, version: int) -> dict[str, Any]:
    """Return the JSON object that `write_json` wrote.

    Raises FileNotFoundError, StorageError for a file that cannot be read, ValueError for what is no JSON object, FormatError
    for another format.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({reason_of(error)})") from error
    values = parse_json(data)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    check_format(path, values.pop("format", 1), version)
    return values


def read_private(path: Path) -> bytes:
    """Return the content of a private key's file. Raises OSError, and ConfigError when others can read it, too."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise ConfigError(f"{path}: others can read this key (mode {mode:04o}); run: chmod 600 {path}")
        return file.read()


def check_outside(out: Path, folders: Iterable[Path]) -> None:
    """Raise ConfigError where `out`, which a user has named to be written, lies in one of these folders, or is one.

    They are of runs and members, and what a command writes there could replace what they live on. Links are followed.
    """
    try:
        place = Path(os.path.realpath(out))
        inside = next((folder for folder in folders if place.is_relative_to(os.path.realpath(folder))), None)
    except OSError:  # the present folder is gone: nothing can be written there either
        return
    if inside is not None:
        raise ConfigError(f"{out}: lies in {inside}, where it could replace a file of the run; name another place")


def check_format(file: object, found: object, version: int, older: Collection[int] = ()) -> None:
    """Raise FormatError, one line that names the file and both formats, unless `found` is what this software reads.

    older: formats that it reads besides the one that it writes.
    """
    if found != version and found not in older:
        raise FormatError(f"{file}: format {found}, this software reads format {version}")
