"""Bytes on their way in: checked chunk by chunk, held in memory up to a bound, beyond it in files.

An upload reserves its whole size in memory when it is opened, or lies in a file from the start, also where the system has no
memory for it: what is held, and what waits for the next uploads, never exceeds three quarters of `buffer_bytes`, whatever the
number of peers. The last quarter is for what is on its way: gRPC takes it from the network before anybody asks for it. A
payload that somebody still reads keeps its memory until the reader lets go.

Uploads are opened, written and dropped on the event loop. Their files are written, compared and removed by the file thread, one
call after the other, so a removal never overtakes a write. A stream waits until its chunk is written before it takes the next
one from the network: a slow disk slows the streams down, and no more than one chunk for each of them waits in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from edit.codecs.base import new_buffer
from edit.durable_files import make_folder
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError
from edit.heaps import MAPPED_BYTES, mapping

__all__ = ["LEAST_SHARE_BYTES", "Upload", "UploadBuffer"]

LEAST_SHARE_BYTES = 1 << 20  # a chunk

Chunk = bytes | bytearray | memoryview
_NOTHING = memoryview(b"")
_serials = itertools.count(1)
Write = Callable[[int, memoryview, int], int]  # os.pwrite


class UploadBuffer:
    """Opens uploads and bounds the memory that they take.

    Args:
        buffer_bytes: the most that is in memory, what is on its way included.
        spill_dir: where the rest goes; what an earlier process left there is removed.
        files: the file thread.
        write: `os.pwrite`, or what a test has in its place.

    Raises StorageError when spill_dir cannot be used.
    """

    def __init__(self, buffer_bytes: int, spill_dir: Path, files: Executor, *, write: Write = os.pwrite) -> None:
        self.held_bytes = 0  # reserved in memory
        self.files, self.write = files, write
        self._way_bytes = buffer_bytes // 4
        self._most_held, self._spill_dir = buffer_bytes - self._way_bytes, spill_dir
        self._opened, self._serial = 0, next(_serials)  # files so far; which buffer of this process: for their names
        self._free: list[mmap.mmap] = []  # of uploads that are gone, the oldest first; any thread may append
        make_folder(spill_dir, 0o700)
        self._remove_files("upload-*.part")

    def open(self, name: str, total_bytes: int) -> Upload:
        """Return a new upload of this size, which the caller has bounded.

        name: what its errors say it is of. Raises RemoteProtocolError when the size is not positive.
        """
        if total_bytes < 1:
            raise RemoteProtocolError(f"{name}: {total_bytes} bytes declared")
        if self.held_bytes + total_bytes <= self._most_held:
            self.held_bytes += total_bytes
            try:
                return Upload(name, total_bytes, self, None)
            except (MemoryError, OSError):  # the system has less than `buffer_bytes`
                self.held_bytes -= total_bytes
        self._opened += 1
        return Upload(name, total_bytes, self, self._spill_dir / f"upload-{self._serial}-{self._opened:08d}.part")

    def share(self, streams: int) -> int:
        """Return how many bytes each of so many streams may have on their way here, before they are written.

        A quarter of `buffer_bytes` for all of them, or a chunk for each.
        """
        return max(LEAST_SHARE_BYTES, self._way_bytes // streams)

    def reserve(self, size: int) -> bool:
        """Reserve so many bytes of the memory for something else; return False where there is no room."""
        if self.held_bytes + size > self._most_held:
            return False
        self.held_bytes += size
        self._trim()
        return True

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        self.held_bytes -= size

    def memory(self, size: int) -> memoryview:
        """Return the memory of an upload whose bytes are reserved: that of an earlier one of this size, or new.

        Contributions are as large in each round. What they leave in the C library's heaps, other things would be put into, and
        the next ones beside those: the heaps grow. A large upload is a mapping of its own, which the next one gets once nobody
        holds it any more, nor a view of it. What waits for that counts as held.
        """
        if size < MAPPED_BYTES:
            self._trim()
            return new_buffer(size)
        mapped = next((each for each in self._free.copy() if len(each) == size), None)
        if mapped is None:
            mapped = mapping(size)
        else:
            self._free.remove(mapped)
        self._trim()
        array = np.frombuffer(mapped, np.uint8)
        weakref.finalize(array, self._free.append, mapped).atexit = False
        return array.data

    def _trim(self) -> None:
        """Give free mappings back, the oldest first, until what is held and what is free is within the bound."""
        while self._free and self.held_bytes + sum(map(len, self._free.copy())) > self._most_held:
            del self._free[0]

    def close(self, *, wait: bool = True) -> None:
        """Remove the files of this buffer, after what is still being written. wait: until it is done."""
        removing = self.files.submit(self._remove_files, f"upload-{self._serial}-*.part")
        if wait:
            removing.result()

    def _remove_files(self, pattern: str) -> None:
        try:
            for path in self._spill_dir.glob(pattern):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._spill_dir}: cannot be used ({error.strerror})") from error


class Upload:
    """One byte string on its way in: chunks in order, without gaps; what came already may come again."""

    def __init__(self, name: str, total_bytes: int, buffer: UploadBuffer, path: Path | None) -> None:
        self.total_bytes = total_bytes
        self.received_bytes = 0  # where the next chunk starts
        self.dropped = ""  # not empty: the bytes are gone, for this reason
        self._name, self._buffer, self._path = name, buffer, path
        self._memory = buffer.memory(total_bytes) if path is None else _NOTHING  # read only when all of it has been written
        self._writing = asyncio.Lock()  # two streams may send the same upload: an old one that is not known to be broken yet

    @property
    def complete(self) -> bool:
        """Whether all bytes are in."""
        return self.received_bytes == self.total_bytes

    async def write(self, offset: int, data: Chunk) -> int:
        """Take one chunk; return received_bytes. A chunk that is in already and equal has no effect.

        Raises:
            RemoteProtocolError: a gap, an overlap, other bytes than before, or too many. The upload stays as
                it was.
            StorageError: the disk refused the chunk. The upload is dropped.
            StaleError: the upload was dropped meanwhile.
        """
        async with self._writing:
            self._check_held()
            end = offset + len(data)
            if offset < 0 or end > self.total_bytes:
                raise RemoteProtocolError(f"{self._name}: bytes {offset} to {end} exceed the declared {self.total_bytes}")
            if not data:
                return self.received_bytes
            if end <= self.received_bytes:
                if await self._bytes_at(offset, end) != data:
                    raise RemoteProtocolError(f"{self._name}: other bytes at {offset} than before")
            elif offset != self.received_bytes:
                word = "gap" if offset > self.received_bytes else "overlap"
                raise RemoteProtocolError(
                    f"{self._name}: {word}: a chunk starts at {offset}, {self.received_bytes} bytes are in"
                )
            else:
                await self._store(offset, data)
                self._check_held()
                self.received_bytes = end
            return self.received_bytes

    def payload(self) -> memoryview:
        """Return all bytes, to be read only. From a file they are mapped, not copied: let go of them soon, ask again.

        Raises LocalProtocolError before the upload is complete, StorageError when the bytes are gone (dropped, or a bad disk).
        """
        if not self.complete:
            raise LocalProtocolError(f"{self._name}: not complete")
        if self.dropped:
            raise StorageError(f"{self._name}: dropped, {self.dropped}")
        if self._path is None:
            return self._memory
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.total_bytes:
                    raise StorageError(f"{self._path}: was changed by somebody else")
                return memoryview(mmap.mmap(file.fileno(), self.total_bytes, access=mmap.ACCESS_COPY))
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be read ({error.strerror})") from error

    def drop(self, reason: str) -> None:
        """Free the bytes for good; a stream that still writes gets the reason."""
        if self.dropped:
            return
        self.dropped = reason
        if self._path is not None:
            self._buffer.files.submit(self._path.unlink, missing_ok=True)
        else:
            self._buffer.held_bytes -= self.total_bytes
            self._memory = _NOTHING

    def _check_held(self) -> None:
        if self.dropped:
            raise StaleError(f"{self._name}: {self.dropped}")

    async def _bytes_at(self, start: int, end: int) -> Chunk:
        if self._path is None:
            return self._memory[start:end]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._buffer.files, _read_file, self._path, start, end)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be read ({error.strerror})") from error

    async def _store(self, offset: int, data: Chunk) -> None:
        if self._path is None:
            self._memory[offset : offset + len(data)] = data
            return
        arguments = (self._buffer.write, self._path, offset, data)
        try:
            await asyncio.get_running_loop().run_in_executor(self._buffer.files, _write_file, *arguments)
        except OSError as error:
            self.drop("the disk refused it")
            raise StorageError(f"{self._path}: cannot be written ({error.strerror})") from error


def _read_file(path: Path, start: int, end: int) -> bytes:
    """In the file thread."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _write_file(write: Write, path: Path, offset: int, data: Chunk) -> None:
    """In the file thread."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            written = write(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
    finally:
        os.close(descriptor)
