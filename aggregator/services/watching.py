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
from dataclasses import replace

from aggregator.control.run import Run
from aggregator.control.status import run_status
from edit.errors import BusyError, RemoteProtocolError
from editpb import control_pb2 as cpb
from editpb.identity import Identity
from editpb.run_status import RunStatus
from editpb.status_messages import status_to_pb
from editpb.transport.channel_options import MESSAGE_BYTES

__all__ = ["MAX_OF_MEMBER", "MAX_WATCHERS", "Watchers", "fit"]

MAX_WATCHERS = 64  # at a time; operators beside
MAX_OF_MEMBER = 4
EVERY_S = 1.0
LEAST_EVERY_S, MOST_EVERY_S = 0.2, 60.0
CURVES_S = 5.0  # curves are sent so often at most
_FRESH_S = 0.1  # a status that is younger serves other watchers too


class Watchers:
    """Those who watch one run. Used on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._of_member: Counter[str] = Counter()
        self._others = 0  # who are no operators
        self._read = dict[bool, tuple[float, RunStatus]]()  # without curves and settings, or whole: when, and what was read

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

    async def statuses(self, every_s: float, authorize: Callable[[], Identity]) -> AsyncGenerator[cpb.StatusReply, None]:
        """Yield messages for ever. authorize: says who watches, each time; what it raises ends them.

        Raises RemoteProtocolError for a number of seconds that is none.
        """
        if not 0 <= every_s < math.inf:
            raise RemoteProtocolError(f"every_s is {every_s}, not a number of seconds")
        pause = min(MOST_EVERY_S, max(LEAST_EVERY_S, every_s or EVERY_S))
        time = asyncio.get_running_loop().time
        last, drawn = None, -math.inf  # the status that was sent before, and when curves were
        while True:
            brief = last is not None and (time() - drawn < CURVES_S or last.outer_step == 0)
            drawn = drawn if brief else time()
            status = self.shown_to(authorize(), brief=brief)
            news, last = status if last is None else _since(status, last), status
            yield fit(news)
            await asyncio.sleep(pause)

    def shown_to(self, identity: Identity, *, brief: bool = False) -> RunStatus:
        """Return the run's status as this member may see it. brief: without curves and settings."""
        now = asyncio.get_running_loop().time()
        at, status = self._read.get(brief, (-math.inf, None))
        if status is None or now - at >= _FRESH_S:
            status = run_status(self._run, brief=brief)
            self._read[brief] = now, status
        return status.shown_to(identity.role, identity.peer_id, self._run.config.membership.share_losses)


def _since(status: RunStatus, last: RunStatus) -> RunStatus:
    """Return what is new since the status before."""
    round_id = last.rounds[-1].round_id if last.rounds else 0
    number = last.events[-1].number if last.events else 0
    return replace(
        status,
        rounds=tuple(each for each in status.rounds if each.round_id > round_id),
        events=tuple(each for each in status.events if each.number > number),
        settings=(),
    )


def fit(status: RunStatus, most: int = MESSAGE_BYTES // 2) -> cpb.StatusReply:
    """Return the status as a message of at most so many bytes: without old rounds, then without curves, where it is larger."""
    reply = status_to_pb(status)
    while reply.ByteSize() > most and reply.rounds:
        del reply.rounds[: (len(reply.rounds) + 1) // 2]
    if reply.ByteSize() > most:
        del reply.curves[:]
    return reply
