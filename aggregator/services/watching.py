"""Watch of control.proto: the status, again and again, to whoever asks for it. No watcher costs the run more than the others.

A watcher has one message under way. The next one is made once that is sent, of the run as it stands then: so who reads slowly
misses some, and nothing waits in memory for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator

from aggregator.control.run import Run
from aggregator.services.status_replies import Seen, StatusReplies
from edit.errors import BusyError, RemoteProtocolError
from editpb import control_pb2 as cpb
from editpb.identity import Identity

__all__ = ["MAX_OF_MEMBER", "MAX_WATCHERS", "Watchers", "until_tick"]

MAX_WATCHERS = 64  # at a time; operators beside
MAX_OF_MEMBER = 4
EVERY_S = 1.0
LEAST_EVERY_S, MOST_EVERY_S = 0.2, 60.0
CURVES_S = 5.0  # curves are sent so often at most


class Watchers:
    """Those who watch one run. Used on the event loop."""

    def __init__(self, run: Run, replies: StatusReplies) -> None:
        self._run, self._replies = run, replies
        self._of_member: Counter[str] = Counter()
        self._others = 0  # who are no operators

    def __len__(self) -> int:
        return self._of_member.total()

    @contextlib.contextmanager
    def place(self, identity: Identity) -> Iterator[None]:
        """Take a place, until the block ends. Raises BusyError when there is none."""
        peer_id, counts = identity.peer_id, identity.role != "operator"
        if self._of_member[peer_id] >= MAX_OF_MEMBER:
            raise BusyError(f"{peer_id} watches {MAX_OF_MEMBER} times here already; end one of them, or try again later")
        if counts and self._others >= MAX_WATCHERS:
            raise BusyError(f"{MAX_WATCHERS} others watch here already; try again later")
        self._of_member[peer_id] += 1
        self._others += counts
        try:
            yield
        finally:
            self._of_member -= Counter((peer_id,))  # drops what is 0
            self._others -= counts

    async def statuses(
        self, every_s: float, authorize: Callable[[], Identity], *, curves_kept: bool = False
    ) -> AsyncGenerator[cpb.StatusReply, None]:
        """Yield messages for ever.

        Args:
            authorize: says who watches, each time; what it raises ends them.
            curves_kept: later messages bring only the new points of curves.

        Raises RemoteProtocolError for a number of seconds that is none.
        """
        if not 0 <= every_s < math.inf:
            raise RemoteProtocolError(f"every_s is {every_s}, not a number of seconds")
        pause = min(MOST_EVERY_S, max(LEAST_EVERY_S, every_s or EVERY_S))
        time, history = asyncio.get_running_loop().time, self._run.history
        seen: Seen | None = None  # what was sent before, and when curves were
        drawn = -math.inf
        while True:
            identity = authorize()
            brief = seen is not None and (time() - drawn < CURVES_S or seen.outer_step == 0 or seen.points == history.points)
            if not brief:
                drawn = time()
            reply, seen = self._replies.watched(identity, seen, brief=brief, curves_kept=curves_kept)
            yield reply
            await asyncio.sleep(until_tick(time(), pause))


def until_tick(now: float, pause: float) -> float:
    """Return the seconds to the next multiple of `pause` that is at least a tenth of a pause away.

    So all who watch at one pace are due together, and one message is made for them.
    """
    return pause * math.ceil(now / pause + 0.1) - now
