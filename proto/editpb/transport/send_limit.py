"""How many bytes a member sends per second, and per day: the bounds that its operator sets (`--max-mbit`, and
`limits.max_gb_per_day` of policy.toml), and who waits for them.

The bound is of all processes of the member on one machine that are given the same file: a peer, its ranks, its host. The file
holds the moment at which the bytes that went so far are through, on the system's monotonic clock, which all processes share,
and the start of the machine whose clock that is.

What waits is what is large: contributions, updates, parameters and states. Heartbeats, requests, answers and what hosts agree
on go at once, and are not counted; with them are headers of gRPC, TLS and TCP, and what stays on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from edit.errors import ConfigError
from editpb.limits import CHUNK_BYTES

__all__ = ["LEAST_MBIT", "UNLIMITED", "DailyLimit", "SendLimit", "SharedSendLimit", "send_limit", "size_of"]

LEAST_MBIT = 0.1
MESSAGE_S = 0.05  # what one message takes; a larger chunk is cut
SLACK_S = 0.05  # that is made up for: who sleeps is woken late
LEAST_CHUNK_BYTES = 4 << 10
LOCK_S = 1.0  # another process that has the lock for so long is stopped, and not waited for
LONGEST_S = 60.0  # a longer line may be of another start of the machine, where the file does not say of which
_LOCK_AGAIN_S = 0.001
_FORMAT = "<d16s"
_DAY_S = 86_400  # and no line is longer: at LEAST_MBIT one message of 4 MiB takes six minutes
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DAY_FORMAT = "<qq"  # the day, counted from 1970, and the bytes of it
_BLOCK_BYTES = 16 << 20  # that a process takes of a day at a time, or a 64th of the day's
_LOOK_S = 30.0  # between two looks at the clock, which may jump
_log = logging.getLogger(__name__)
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


def _lock(file: int) -> bool | None:
    """Return whether the file is locked; None: another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # a file system without locks
        return False
    return True


def _start() -> bytes:
    """Return which start of the machine this is; b"" where the system does not say."""
    try:
        return UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


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
        self._start = _start()
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
        while (locked := _lock(self._file)) is None and self._clock() - begun < LOCK_S:
            await self._sleep(_LOCK_AGAIN_S)
        try:
            now = self._clock()
            begins = max(self._through, self._read(now), now - SLACK_S)
            self._through = begins + count / self._bytes_per_s
            with contextlib.suppress(OSError):
                os.pwrite(self._file, struct.pack(_FORMAT, self._through, self._start), 0)
            return begins - now
        finally:
            if locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self, now: float) -> float:
        try:
            data = os.pread(self._file, struct.calcsize(_FORMAT), 0)
            (through,) = struct.unpack_from("<d", data)
        except (OSError, struct.error):
            return 0.0
        of_this_start = self._start and data[struct.calcsize("<d") :] == self._start
        return through if now - LONGEST_S < through < now + (_DAY_S if of_this_start else LONGEST_S) else 0.0


class DailyLimit(SendLimit):
    """At most so many bytes on a day of UTC; what is more waits for the next day. Used on one event loop.

    The file has what the day's processes have taken; one that is killed has taken up to a block more than it sent. A clock that
    is set back by up to a day begins no new day. By more, it was ahead: what was taken then counts for the day that it shows.
    The file keeps the day that a jump of the clock has left, too: when the clock shows that again, its bytes are still taken.

    Args:
        most_bytes: per day.
        path: of the file that all processes of the member share; made if there is none.
        within: the bound per second.
        unix: seconds since 1970.

    Raises ConfigError.
    """

    def __init__(
        self,
        most_bytes: int,
        path: Path,
        within: SendLimit = UNLIMITED,
        *,
        unix: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._most, self._path, self._within, self._unix, self._sleep = most_bytes, path, within, unix, sleep
        self.chunk_bytes = within.chunk_bytes
        self._day, self._left = -1, 0  # what this process has taken of a day, and not used yet
        self._full = -1  # the day that is used up
        self._told = -1  # the day of which the log has said that it is used up
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written, and limits.max_gb_per_day needs it ({error.strerror})") from error

    async def room(self, count: int) -> None:
        """See `SendLimit`. Where the file cannot be written, nothing may go."""
        while not await self._take(count):
            await self._sleep(min(_LOOK_S, _DAY_S - self._unix() % _DAY_S))
        await self._within.room(count)

    async def _take(self, count: int) -> bool:
        """Take `count` bytes of this day, if there are so many."""
        today = int(self._unix() // _DAY_S)
        if self._day < today or self._left < count:
            block = max(count, min(_BLOCK_BYTES, self._most // 64))
            if not await self._take_block(today, block) and not await self._take_block(today, count):
                tomorrow = date(1970, 1, 1) + timedelta(days=self._full + 1)
                sent = f"limits.max_gb_per_day = {self._most / 1e9:g}: that is sent ({self._path})"
                self._say(today, f"{sent}; nothing more goes out before {tomorrow}, 0:00 UTC")
                return False
        self._left -= count
        return True

    async def _take_block(self, today: int, count: int) -> bool:
        while (locked := _lock(self._file)) is None:
            await self._sleep(_LOCK_AGAIN_S)
        try:
            day, taken = self._read(today)
            if taken + count > self._most:
                self._full = day
                return False
            os.pwrite(self._file, struct.pack(_DAY_FORMAT, day, taken + count), 0)
            os.fsync(self._file)
            self._left = count + (self._left if self._day == day else 0)
            self._day = day
            return True
        except OSError as error:  # what is not counted does not go out
            self._say(today, f"{self._path}: cannot be written ({error.strerror}), and limits.max_gb_per_day needs it")
            return False
        finally:
            if locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self, today: int) -> tuple[int, int]:
        """Return the day that counts, and what was taken of it: all where the file is damaged."""
        size = struct.calcsize(_DAY_FORMAT)
        data = os.pread(self._file, 2 * size + 1, 0)
        if not data:
            return today, 0
        try:
            day, taken = struct.unpack(_DAY_FORMAT, data[:size])
            left, of_left = struct.unpack(_DAY_FORMAT, data[size:]) if len(data) > size else (-1, 0)
        except struct.error:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, struct.pack(_DAY_FORMAT, today, self._most), 0)
            return today, self._most
        if today <= day <= today + 1:
            return day, taken
        now = max(taken, of_left) if left == today else taken if day > today else 0
        if day != today - 1:
            os.pwrite(self._file, struct.pack(_DAY_FORMAT, today, now) + struct.pack(_DAY_FORMAT, day, taken), 0)
        return today, now

    def _say(self, today: int, why: str) -> None:
        if self._told != today:
            self._told = today
            _log.warning("%s", why)


def send_limit(mbit: float | None, home: Path, gb_per_day: float = 0.0) -> SendLimit:
    """Return the bound of the member whose folder this is. Raises ConfigError.

    Args:
        mbit: per second, in 10^6 bits; None: any.
        gb_per_day: in 10^9 bytes; 0: any.
    """
    limit = UNLIMITED if mbit is None else SharedSendLimit(mbit, home / "send-limit")
    return DailyLimit(int(gb_per_day * 1e9), home / "sent-today", limit) if gb_per_day else limit


def size_of(message: Any) -> int:
    """Return the bytes of a message of protobuf, or of one that is serialized already."""
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
