"""How many bytes a member sends per second: the bound that its operator sets (`--max-mbit`), and who waits for it.

The bound is of all processes of the member on one machine that are given the same file: a peer, its ranks, its host. The file
holds the moment at which the bytes that went so far are through, on the system's monotonic clock, which all processes share.

What waits is what is large: contributions, updates, parameters and states. Heartbeats, requests, answers and what hosts agree
on go at once, and are not counted; with them are headers of gRPC, TLS and TCP, and what stays on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from edit.errors import ConfigError
from editpb.limits import CHUNK_BYTES

__all__ = ["LEAST_MBIT", "UNLIMITED", "SendLimit", "SharedSendLimit", "send_limit", "size_of"]

LEAST_MBIT = 0.1
MESSAGE_S = 0.05  # what one message takes; a larger chunk is cut
SLACK_S = 0.05  # that is made up for: who sleeps is woken late
LEAST_CHUNK_BYTES = 4 << 10
LOCK_S = 1.0  # another process that has the lock for so long is stopped, and not waited for
LONGEST_S = 60.0  # the line is never so long: what the file says is of another start of the machine
_LOCK_AGAIN_S = 0.001
_FORMAT = "<d"
_Part = TypeVar("_Part")


class SendLimit:
    """No bound at all. chunk_bytes: the most that a message is to carry."""

    chunk_bytes = CHUNK_BYTES

    async def room(self, count: int) -> None:
        """Wait until `count` bytes may go."""

    async def paced(self, parts: Iterable[_Part]) -> AsyncIterator[_Part]:
        """Yield messages, each as soon as it may go."""
        for part in parts:
            await self.room(size_of(part))
            yield part


UNLIMITED = SendLimit()


class SharedSendLimit(SendLimit):
    """At most `mbit` million bits per second, and no more than a tenth of a second's in advance. Used on one event loop.

    Args:
        mbit: at least LEAST_MBIT.
        path: of the file that all processes of the member share; made if there is none.
        clock: monotonic seconds, equal in all of them.

    Raises ConfigError.
    """

    def __init__(
        self,
        mbit: float,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not (math.isfinite(mbit) and mbit >= LEAST_MBIT):
            raise ConfigError(f"--max-mbit {mbit:g}: must be at least {LEAST_MBIT:g}")
        self._bytes_per_s = mbit * 1e6 / 8
        self.chunk_bytes = int(min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, self._bytes_per_s * MESSAGE_S)))
        self._clock, self._sleep = clock, sleep
        self._through = 0.0  # when what this process has sent is through
        self._turn = asyncio.Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written, and --max-mbit needs it ({error.strerror})") from error

    async def room(self, count: int) -> None:
        """See `SendLimit`. First come, first served; of each process one is in line. Who is cancelled has had its turn."""
        async with self._turn:
            if (wait_s := await self._reserve(count)) > 0:
                await self._sleep(wait_s)

    async def _reserve(self, count: int) -> float:
        """Put `count` bytes in line; return how long to wait for those before, in seconds."""
        begun = self._clock()
        while (locked := self._lock()) is None and self._clock() - begun < LOCK_S:
            await self._sleep(_LOCK_AGAIN_S)
        try:
            now = self._clock()
            begins = max(self._through, self._read(now), now - SLACK_S)
            self._through = begins + count / self._bytes_per_s
            with contextlib.suppress(OSError):
                os.pwrite(self._file, struct.pack(_FORMAT, self._through), 0)
            return begins - now
        finally:
            if locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool | None:
        """Return whether the file is locked; None: another process has the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # a file system without locks
            return False
        return True

    def _read(self, now: float) -> float:
        try:
            (through,) = struct.unpack(_FORMAT, os.pread(self._file, struct.calcsize(_FORMAT), 0))
        except (OSError, struct.error):
            return 0.0
        return through if now - LONGEST_S < through < now + LONGEST_S else 0.0


def send_limit(mbit: float | None, home: Path) -> SendLimit:
    """Return the bound of the member whose folder this is; none where mbit is None. Raises ConfigError."""
    return UNLIMITED if mbit is None else SharedSendLimit(mbit, home / "send-limit")


def size_of(message: Any) -> int:
    """Return the bytes of a message of protobuf, or of one that is serialized already."""
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
