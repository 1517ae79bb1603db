"""How many bytes one call of the data plane carries, from measured times. Sans-IO.

A link that is slow, or that other data fills, keeps what was sent ahead in a queue; heartbeats wait behind it. What is on the
way is therefore bounded by time: a call carries what the link takes in `call_s`, and the next one follows when its bytes are
there. Where that is more than `ENOUGH_BYTES` there is nothing to bound: gRPC's own windows hold about as much.

    call_s     CALL_S, or ROUND_TRIPS round trips where that is longer, so that a link of long latency is still filled
    bytes      START_BYTES at first; then what was last carried in one call, times call_s, by the seconds that it took
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CALL_S", "ENOUGH_BYTES", "LEAST_BYTES", "LONGEST_S", "MOST_BYTES", "ROUND_TRIPS", "START_BYTES", "Pace"]

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

    @property
    def call_s(self) -> float:
        """How long a call is to take, in seconds."""
        return min(LONGEST_S, max(CALL_S, ROUND_TRIPS * self._rtt_s()))

    @property
    def bytes(self) -> int:
        """How many bytes the next call is to carry."""
        return self._bytes

    def stop(self, start: int, total: int) -> int:
        """Return where a call ends that sends `data[start:total]` in order: at `total` where the link is fast enough."""
        left = total - start
        return total if self._bytes >= ENOUGH_BYTES or left <= self._bytes * 5 // 4 else start + self._bytes

    def carried(self, count: int, seconds: float, *, asked: int) -> None:
        """Take note that a call brought `count` bytes of `asked` in so many seconds.

        One that brought fewer, because there were no more, took its round trip rather than its bytes' time. It only tells of a
        link that has become slow.
        """
        if count < asked and seconds <= self.call_s:
            return
        fitting = int(min(MOST_BYTES, max(LEAST_BYTES, count * self.call_s / max(seconds, 1e-6))))
        self._bytes = fitting if count >= asked else min(self._bytes, fitting)
