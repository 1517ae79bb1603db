"""A file is replaced as a whole or not at all, and one of another format is named with both versions."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.storage.state_folder import lock_folder
from edit import durable_files
from edit.durable_files import (
    append_whole,
    check_format,
    read_json,
    read_private,
    rename,
    write_atomic,
    write_atomic_with,
    write_json,
)
from edit.errors import ConfigError, FormatError, StorageError
from edit.trust.privacy_ledger import PrivacyLedger
from tests.support.full_disk import FullDisk


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_and_name_are_on_disk_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    really_replace, really_fsync = Path.replace, os.fsync

    def replace(self: Path, target: Path) -> Path:
        done.append(f"{self.name} -> {target.name}")
        return really_replace(self, target)

    def fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        really_fsync(descriptor)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(durable_files.sync, "__defaults__", (fsync,))
    write_atomic(tmp_path / "a", b"one")
    assert done == ["fsync .a.tmp", ".a.tmp -> a", f"fsync {tmp_path.name}"]
    assert (tmp_path / "a").read_bytes() == b"one"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("refused")])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    def write(file: Path) -> None:
        file.write_bytes(b"half")
        raise error

    write_atomic(tmp_path / "a", b"old")
    with pytest.raises(StorageError, match=r"/a: cannot be written \((No space left on device|refused)\)$"):
        write_atomic_with(tmp_path / "a", write, failures=(ValueError,))
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"old", ["a"])


BEGIN_AND_BE_KILLED = """
import os, signal, sys
from pathlib import Path
from edit.durable_files import write_atomic_with
write_atomic_with(Path(sys.argv[1]), lambda _: os.kill(os.getpid(), signal.SIGKILL), shared=True)
"""


def test_a_shared_file_may_have_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("\u015f" * 127)  # 254 bytes, where 255 are allowed
    write_atomic(path, b"whole", shared=True)
    assert path.read_bytes() == b"whole" and [*tmp_path.iterdir()] == [path]


def test_who_writes_a_shared_file_at_the_same_time_and_is_killed_leaves_the_others_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ended = tmp_path / "a", list[int]()

    def fsync(descriptor: int) -> None:
        if not ended:
            ended.append(subprocess.run([sys.executable, "-c", BEGIN_AND_BE_KILLED, path]).returncode)
        os.fsync(descriptor)

    monkeypatch.setattr(durable_files.sync, "__defaults__", (fsync,))
    write_atomic(path, b"whole", shared=True)
    assert (ended, path.read_bytes()) == ([-signal.SIGKILL], b"whole")


def test_a_bug_of_the_writer_stays_what_it_is(tmp_path: Path) -> None:
    def write(file: Path) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_atomic_with(tmp_path / "a", write, failures=(ValueError,))
    assert names(tmp_path) == []


def test_a_failed_sync_is_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files.sync, "__defaults__", (full,))
    with pytest.raises(StorageError, match="No space left"):
        write_atomic(tmp_path / "a", b"one")
    assert names(tmp_path) == []


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    (tmp_path / ".key.tmp").write_bytes(b"left over, and readable by all")
    modes: list[int] = []

    def write(file: Path) -> None:
        file.write_bytes(b"secret")
        modes.append(file.stat().st_mode & 0o777)

    write_atomic_with(tmp_path / "key", write, mode=0o600)
    assert [*modes, (tmp_path / "key").stat().st_mode & 0o777] == [0o600, 0o600]


def test_a_folder_is_renamed_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "a").write_bytes(b"one")
    rename(tmp_path / "partial", tmp_path / "whole")
    assert names(tmp_path) == ["whole"] and (tmp_path / "whole" / "a").read_bytes() == b"one"


def test_json_comes_back_without_its_format(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, None]}, version=3)
    assert read_json(tmp_path / "a.json", version=3) == {"x": [1, None]}
    with pytest.raises(FormatError, match=r"/a.json: format 3, this software reads format 2$") as error:
        read_json(tmp_path / "a.json", version=2)
    assert error.value.exit_code == 2 and not isinstance(error.value, StorageError), "it is not damaged"


def test_what_has_no_format_is_of_format_1(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": 1}')
    assert read_json(tmp_path / "a.json", version=1) == {"x": 1}
    with pytest.raises(FormatError, match="format 1, this software reads format 2"):
        read_json(tmp_path / "a.json", version=2)


@pytest.mark.parametrize("text", ["", "[1]", "{", "7"])
def test_what_is_no_json_object_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json", version=1)


def test_the_formats_are_compared_for_equality() -> None:
    check_format("a", 1, 1)
    for found in (0, 2, "1", None):
        with pytest.raises(FormatError):
            check_format("a", found, 1)


def test_json_that_is_nested_too_deeply_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "a.json", version=1)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".a.tmp").symlink_to(victim)
    write_atomic(tmp_path / "a", b"one")
    assert (victim.read_bytes(), (tmp_path / "a").read_bytes(), (tmp_path / "a").is_symlink()) == (b"precious", b"one", False)


@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "is no regular file"), (os.mkdir, "cannot be written .Is a directory")])
def test_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path, make: Callable[[Path], None], what: str) -> None:
    make(tmp_path / "there")
    before = (tmp_path / "there").stat()
    with pytest.raises(StorageError, match=f"there: {what}"):
        write_atomic(tmp_path / "there", b"new")
    assert (tmp_path / "there").stat().st_ino == before.st_ino and names(tmp_path) == ["there"]


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.json").symlink_to("run.json")
    with pytest.raises(StorageError, match=r"run\.json: cannot be read \(Too many levels of symbolic links\)"):
        read_json(tmp_path / "run.json", version=1)


def test_a_link_that_takes_the_place_of_the_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may write in the folder is quicker than this process, at any moment."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    really_open, really_write = os.open, os.write

    def swap() -> None:
        (tmp_path / ".a.tmp").unlink(missing_ok=True)
        (tmp_path / ".a.tmp").symlink_to(victim)

    def open_late(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            swap()
        return really_open(path, flags, *mode)  # type: ignore[arg-type]

    def write_late(descriptor: int, data: memoryview) -> int:
        swap()
        return really_write(descriptor, data)

    for name, late in (("open", open_late), ("write", write_late)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, late)
            with pytest.raises(StorageError, match=r"/a: cannot be written \((File exists|Too many levels of symbolic links)"):
                write_atomic(tmp_path / "a", b"one")
        assert victim.read_bytes() == b"precious" and names(tmp_path) == ["victim"]


def test_a_writer_that_puts_another_file_there_cannot_widen_its_permissions(tmp_path: Path) -> None:
    def write(file: Path) -> None:
        file.unlink()
        file.write_bytes(b"secret")
        file.chmod(0o644)

    write_atomic_with(tmp_path / "key", write, mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o610])
def test_a_key_that_others_can_read_is_refused_with_the_mend(tmp_path: Path, mode: int) -> None:
    write_atomic(tmp_path / "key", b"secret", mode=0o600)
    assert read_private(tmp_path / "key") == b"secret"
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"/key: others can read this key \(mode {mode:04o}\); run: chmod 600 /.*/key$"):
        read_private(tmp_path / "key")


def test_what_does_not_fit_on_the_disk_is_not_appended_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = FullDisk(monkeypatch), tmp_path / "lines"
    with path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), b"one\n")
        disk.room = 2
        with pytest.raises(OSError, match="No space left"):
            append_whole(file.fileno(), b"two\n")
        assert path.read_bytes() == b"one\n"
        disk.room = None
        append_whole(file.fileno(), b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_pipe_that_nobody_reads_any_more_refuses_with_its_own_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        append_whole(writer, b"one\n")
    os.close(writer)


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named_and_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    opened, closed = [], []
    really_open, really_close = os.open, os.close

    def opens(*arguments: object) -> int:
        opened.append(really_open(*arguments))  # type: ignore[arg-type]
        return opened[-1]

    def closes(descriptor: int) -> None:
        closed.append(descriptor)
        really_close(descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "close", closes)
    said = rf"its file system has no locks \({os.strerror(reason)}\); put the folder on a local disk"
    with pytest.raises(StorageError, match=f"/lock: {said}"):
        lock_folder(tmp_path, "another coordinator is serving this folder")
    with pytest.raises(StorageError, match=f"/privacy.jsonl: {said}"):
        PrivacyLedger(tmp_path / "privacy.jsonl")
    assert opened == closed and len(opened) == 2
