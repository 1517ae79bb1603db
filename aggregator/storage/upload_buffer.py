"""Bytes of contributions on their way in: reassembled, checked, held in memory up to a bound, beyond it on disk.

Owns: the uploads, one per (peer_id, round_id, fragment_id, rank), and the bound. Must not know: codecs, rounds, which attempt
counts (`aggregator.data.sharded_fragment`), gRPC. The caller bounds the declared sizes. One thread at a time; chunks are
small, so a write to disk is short.

A upload reserves its whole size in memory when it is opened, or lies in a file from the start: what is held never exceeds
`buffer_bytes`, whatever the number of peers. A payload that somebody still reads keeps its memory until the reader lets go.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError

__all__ = ["Upload", "UploadBuffer"]

Key = tuple[str, int, int, int]
Write = Callable[[int, memoryview, int], int]  # os.pwrite


class Upload:
    """One rank's part of a contribution on its way in: chunks in order, without gaps; what came already may come again."""

    def __init__(
        self, key: Key, total_bytes: int, path: Path | None, write: Write, forget: Callable[[Upload, str], None]
    ) -> None:
        self.peer_id, self.round_id, self.fragment_id, self.rank = self.key = key
        self.total_bytes = total_bytes
        self._received = 0
        self._dropped = ""
        self._path = path
        self._write = write
        self._forget = forget
        self._memory = bytearray(total_bytes) if path is None else bytearray()

    @property
    def received_bytes(self) -> int:
        """Where the next chunk starts."""
        return self._received

    @property
    def complete(self) -> bool:
        return self._received == self.total_bytes

    @property
    def spilled(self) -> bool:
        """Whether the bytes lie on disk."""
        return self._path is not None

    def write(self, offset: int, data: bytes | bytearray | memoryview, crc32: int) -> int:
        """Take one chunk; returns received_bytes. A chunk that is in already and equal has no effect.

        Raises RemoteProtocolError for a wrong checksum, a gap, an overlap, other bytes than before, or too many: the upload
        stays as it was. Raises StorageError when the disk refuses: the upload is dropped, a retry begins anew. Raises
        StaleError when it was dropped meanwhile.
        """
        if self._dropped:
            raise StaleError(f"{self}: {self._dropped}")
        if zlib.crc32(data) != crc32:
            raise RemoteProtocolError(f"{self}: wrong checksum of the chunk at {offset}")
        end = offset + len(data)
        if offset < 0 or end > self.total_bytes:
            raise RemoteProtocolError(f"{self}: bytes {offset} to {end} exceed the declared {self.total_bytes}")
        if not data:
            return self._received
        if end <= self._received:
            self._check_repeated(offset, data)
        elif offset != self._received:
            word = "gap" if offset > self._received else "overlap"
            raise RemoteProtocolError(f"{self}: {word}: a chunk starts at {offset}, {self._received} bytes are in")
        else:
            self._store(offset, data)
            self._received = end
        return self._received

    def payload(self) -> memoryview:
        """All bytes, to be read only; from disk they are mapped, not copied: let go of them soon, ask again when needed.

        Raises LocalProtocolError before the upload is complete, StorageError when the bytes are gone (dropped, or a bad disk).
        """
        if not self.complete:
            raise LocalProtocolError(f"{self}: not complete")
        if self._dropped:
            raise StorageError(f"{self}: dropped, {self._dropped}")
        if self._path is None:
            return memoryview(self._memory)
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.total_bytes:
                    raise StorageError(f"{self._path}: was changed by somebody else")
                return memoryview(mmap.mmap(file.fileno(), self.total_bytes, access=mmap.ACCESS_COPY))
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be read ({error.strerror})") from error

    def drop(self, reason: str) -> None:
        """Let go of the bytes; `UploadBuffer` calls it."""
        self._dropped = reason
        self._memory = bytearray()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _check_repeated(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        if self._path is None:
            known: bytes | memoryview = memoryview(self._memory)[offset : offset + len(data)]
        else:
            try:
                with self._path.open("rb") as file:
                    file.seek(offset)
                    known = file.read(len(data))
            except OSError as error:
                raise StorageError(f"{self._path}: cannot be read ({error.strerror})") from error
        if known != data:
            raise RemoteProtocolError(f"{self}: other bytes at {offset} than before")

    def _store(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        if self._path is None:
            self._memory[offset : offset + len(data)] = data
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                rest = memoryview(data).cast("B")
                while rest:
                    written = self._write(descriptor, rest, offset)
                    rest, offset = rest[written:], offset + written
            finally:
                os.close(descriptor)
        except OSError as error:
            self._forget(self, "the disk refused it")
            raise StorageError(f"{self._path}: cannot be written ({error.strerror})") from error

    def __str__(self) -> str:
        return _said(self.key)


def _said(key: Key) -> str:
    """The key in words."""
    peer_id, round_id, fragment_id, rank = key
    part = f", rank {rank}" if rank else ""
    return f"contribution of {peer_id} to round {round_id}, fragment {fragment_id}{part}"


class UploadBuffer:
    """All uploads. buffer_bytes: the most that is held in memory; spill_dir: where the rest goes; write: injected for tests."""

    def __init__(self, buffer_bytes: int, spill_dir: Path, *, write: Write = os.pwrite) -> None:
        self._buffer_bytes = buffer_bytes
        self._spill_dir = spill_dir
        self._write = write
        self._uploads: dict[Key, Upload] = {}
        self._files = 0
        self._held = 0
        self._clear_leftovers()

    @property
    def held_bytes(self) -> int:
        """Memory reserved now; never more than buffer_bytes."""
        return self._held

    @property
    def spilled_bytes(self) -> int:
        """Bytes that lie on disk now."""
        return sum(upload.received_bytes for upload in self._uploads.values() if upload.spilled)

    def open(self, peer_id: str, round_id: int, fragment_id: int, total_bytes: int, rank: int = 0) -> Upload:
        """The upload of this key; the same one when it is open already: a retry goes on where the last attempt broke.

        Raises RemoteProtocolError when the size is not positive or not the one declared before, StorageError.
        """
        key = (peer_id, round_id, fragment_id, rank)
        upload = self._uploads.get(key)
        if upload is None:
            upload = self._uploads[key] = self._new_upload(key, total_bytes)
        elif upload.total_bytes != total_bytes:
            raise RemoteProtocolError(f"{upload}: {total_bytes} bytes declared, {upload.total_bytes} before")
        return upload

    def find(self, peer_id: str, round_id: int, fragment_id: int, rank: int = 0) -> Upload | None:
        """The open upload of this key, or None."""
        return self._uploads.get((peer_id, round_id, fragment_id, rank))

    def drop(self, upload: Upload, reason: str = "its round is over") -> None:
        """Forget one upload and free its bytes; whoever still writes to it is told the reason."""
        if self._uploads.get(upload.key) is upload:
            del self._uploads[upload.key]
            self._held -= 0 if upload.spilled else upload.total_bytes
            upload.drop(reason)

    def close(self) -> None:
        """Forget everything."""
        for upload in list(self._uploads.values()):
            self.drop(upload)

    def _new_upload(self, key: Key, total_bytes: int) -> Upload:
        if total_bytes < 1:
            raise RemoteProtocolError(f"{_said(key)}: {total_bytes} bytes declared")
        if self._held + total_bytes <= self._buffer_bytes:
            self._held += total_bytes
            return Upload(key, total_bytes, None, self._write, self.drop)
        self._files += 1
        path = self._spill_dir / f"upload-{self._files:08d}.part"
        return Upload(key, total_bytes, path, self._write, self.drop)

    def _clear_leftovers(self) -> None:
        """A process that was killed leaves its files behind."""
        try:
            self._spill_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._spill_dir.glob("upload-*.part"):
                path.unlink()
        except OSError as error:
            raise StorageError(f"{self._spill_dir}: cannot be used ({error.strerror})") from error
