"""How many bytes one call of the data plane carries, from measured times. Sans-IO.

A link that is slow, or that other data fills, keeps what was sent ahead in a queue; heartbeats wait behind it. What is on the
way is therefore bounded by time: a call carries what the link takes in `call_s`, and the next one follows when its bytes are
there. Where that is more than `ENOUGH_BYTES` there is nothing to bound: gRPC's own windows hold about as much.

    call_s     CALL_S, or ROUND_TRIPS round trips where that is longer, so that a link of long latency is still filled
    bytes      START_BYTES at first; then what was last carried during one call, times call_s, by the seconds that it took

Calls that send side by side share what was measured: each carries its part, and what all of them brought during one call is
what the link took. By its own bytes alone a call would look slow that only waited for its answer, behind what comes the other
way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from editpb.limits import MAX_COUNT

__all__ = ["CALL_S", "ENOUGH_BYTES", "LEAST_BYTES", "LONGEST_S", "MOST_BYTES", "ROUND_TRIPS", "START_BYTES", "Pace", "Piece"]

CALL_S = 0.3
ROUND_TRIPS = 4
LONGEST_S = 2.0  # however long an answer took
START_BYTES = 256 << 10  # in 2 s at 1 Mbit/s
LEAST_BYTES = 16 << 10  # a call costs about 1 KB beside its bytes
ENOUGH_BYTES = 4 << 20  # 0.3 s at 110 Mbit/s
MOST_BYTES = 1 << 30


class Pace:
    """The size of calls in one direction of one link. rtt_s: the least round trip in seconds that was seen; 0: none was."""

    def __init__(self, rtt_s: Callable[[], float] = lambda: 0.0) -> None:
        self._rtt_s = rtt_s
        self._bytes = START_BYTES
        self._known = False  # whether a call has carried as much as it might
        self._sending = 0  # pieces under way
        self._arrived = 0  # bytes of all pieces so far

    @property
    def call_s(self) -> float:
        """How long a call is to take, in seconds."""
        return min(LONGEST_S, max(CALL_S, ROUND_TRIPS * self._rtt_s()))

    @property
    def bytes(self) -> int:
        """How many bytes the next call is to carry."""
        return self._bytes

    @property
    def slow(self) -> bool:
        """Whether the link is known to be one whose calls are bounded."""
        return self._known and self._bytes < ENOUGH_BYTES

    def piece(self, start: int, total: int, most: int = MAX_COUNT) -> Piece:
        """Return what a call sends next of `data[start:total]`, at most `most` bytes."""
        return Piece(self, start, total, most)

    def carried(self, count: int, seconds: float, *, asked: int) -> None:
        """Take note that `count` bytes came in the so many seconds of a call that asked for `asked`.

        One that brought fewer, because there were no more, took its round trip rather than its bytes' time. It only tells of a
        link that has become slow.
        """
        if count < asked and seconds <= self.call_s:
            return
        fitting = int(min(MOST_BYTES, max(LEAST_BYTES, count * self.call_s / max(seconds, 1e-6))))
        self._bytes = fitting if count >= asked else min(self._bytes, fitting)
        self._known = True


class Piece:
    """What one call sends of `data[start:total]`: all where the link is fast enough. A context: the call is under way."""

    def __init__(self, pace: Pace, start: int, total: int, most: int) -> None:
        self._pace, self._before = pace, pace._arrived
        self.start, self.last = start, True
        share = max(LEAST_BYTES, pace.bytes // (pace._sending + 1)) if pace._known else pace.bytes
        if pace.bytes < ENOUGH_BYTES and total - start > share * 5 // 4:
            total, self.last = start + share, False
        self._paced = not self.last and total - start <= most  # else its round trip counts more than its bytes' time
        if total - start > most:
            total, self.last = start + most, False
        self.stop = total

    def __enter__(self) -> Self:
        self._pace._sending += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pace._sending -= 1

    def arrived(self, seconds: float) -> None:
        """Take note that it arrived after so many seconds; of the last one, that it was handed over after so many."""
        pace = self._pace
        pace._arrived += self.stop - self.start
        brought = pace._arrived - self._before
        pace.carried(brought, seconds, asked=brought if self._paced else brought + 1)
