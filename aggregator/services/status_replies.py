"""The messages of Status and Watch: what many ask for at the same time is read and made once."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from aggregator.control.run import Run
from aggregator.control.status import peak_memory_bytes, run_status
from editpb import control_pb2 as cpb
from editpb.identity import Identity
from editpb.run_status import KEPT_ROUNDS, RoundReport, RunStatus
from editpb.status_messages import round_to_pb, status_to_pb
from editpb.transport.channel_options import MESSAGE_BYTES

__all__ = ["Seen", "StatusReplies"]

MOST_BYTES = MESSAGE_BYTES // 2  # of a message
_FRESH_S = 0.1  # a status that is younger serves other watchers too
_PEAK_S = 10.0  # the size of the process, which is dear to ask for, is as old as that at most
_KEPT_REPLIES = 8  # of one status, for watchers that have seen different rounds and events


@dataclass(frozen=True, slots=True)
class Seen:
    """What a watcher has seen: it gets the later rounds and events, and the settings only in its first message."""

    round_id: int = 0
    event: int = 0  # its number
    outer_step: int = 0
    points: int = 0  # as `History.points` was when curves were sent


_Asked = tuple[str | None, Seen | None, bool, bool]  # who sees it, what was seen before, brief or not, curves kept or not


class StatusReplies:
    """Makes the messages of one run. Used on the event loop.

    A closed round does not change: it is turned into bytes once, and kept as these. What all watchers of the same role ask for
    within a tenth of a second is one message, which nobody may change.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._peak = -math.inf, 0  # when the size of the process was asked for, and what it was
        self._rounds: dict[int, bytes] = {}  # the last ones, each as a StatusReply that has only this round
        self._rounds_bytes = 0
        self._read: tuple[float, RunStatus | None] = -math.inf, None  # when, and what was read, without curves
        self._made: dict[_Asked, tuple[cpb.StatusReply, Seen]] = {}  # of that, and what has been seen with it

    def now(self, identity: Identity, rounds_after: int = 0, *, brief: bool = False) -> cpb.StatusReply:
        """Return how the run stands this moment, as this member may see it. brief: without curves and settings."""
        status = run_status(self._run, rounds_after, brief=brief)
        return self.reply(self._shown(status, self._audience(identity)))

    def watched(
        self, identity: Identity, seen: Seen | None, *, brief: bool = False, curves_kept: bool = False
    ) -> tuple[cpb.StatusReply, Seen]:
        """Return a message for a watcher, and what it has seen then.

        Args:
            seen: before; None: nothing, and the message is whole.
            brief: without curves.
            curves_kept: of curves, only the points since then.
        """
        now = asyncio.get_running_loop().time()
        at, status = self._read
        if status is None or now - at >= _FRESH_S:
            if now - self._peak[0] >= _PEAK_S:
                self._peak = now, peak_memory_bytes()
            status = run_status(self._run, brief=True, peak_bytes=self._peak[1])
            self._read = now, status
            self._made.clear()
        audience, history = self._audience(identity), self._run.history
        asked = audience, seen, brief, curves_kept
        if (made := self._made.get(asked)) is None:
            before = seen or Seen()
            told = _since(status, seen) if seen is not None else replace(status, settings=self._run.settings)
            if not brief:
                told = replace(told, curves=history.curves(before.points if curves_kept else 0))
            reply = self.reply(self._shown(told, audience))
            made = reply, _seen(status, before, history.points if reply.curves else before.points)
            if not audience and len(self._made) < _KEPT_REPLIES:  # what one peer alone may see, nobody else asks for
                self._made[asked] = made
        return made

    def reply(self, status: RunStatus, most: int = MOST_BYTES) -> cpb.StatusReply:
        """Return the status as a message of at most so many bytes: without old rounds, then without curves, if it is larger."""
        reply = status_to_pb(replace(status, rounds=()))
        room, parts = most - reply.ByteSize(), list[bytes]()
        for report in reversed(status.rounds):
            part = self._bytes_of(report)
            room -= len(part)
            if room < 0:
                break
            parts.append(part)
        reply.MergeFromString(b"".join(reversed(parts)))
        if reply.ByteSize() > most:
            del reply.curves[:]
        return reply

    def _audience(self, identity: Identity) -> str | None:
        """Return whose losses this member sees: one peer's, nobody's (''), or everybody's (None)."""
        if identity.role == "operator" or self._run.config.membership.share_losses:
            return None
        return identity.peer_id if identity.role in ("peer", "region") else ""

    def _shown(self, status: RunStatus, audience: str | None) -> RunStatus:
        return status if audience is None else status.shown_to("", audience, share_losses=False)

    def _bytes_of(self, report: RoundReport) -> bytes:
        """Return a round as bytes, and keep them as long as it is among the last ones."""
        if (part := self._rounds.get(report.round_id)) is not None:
            return part
        part = cpb.StatusReply(rounds=[round_to_pb(report)]).SerializeToString()
        self._rounds[report.round_id] = part
        self._rounds_bytes += len(part)
        while len(self._rounds) > KEPT_ROUNDS or self._rounds_bytes > MOST_BYTES:
            self._rounds_bytes -= len(self._rounds.pop(min(self._rounds)))
        return part


def _since(status: RunStatus, seen: Seen) -> RunStatus:
    """Return what is new since then."""
    return replace(
        status,
        rounds=status.rounds[bisect_right(status.rounds, seen.round_id, key=lambda each: each.round_id) :],
        events=status.events[bisect_right(status.events, seen.event, key=lambda each: each.number) :],
    )


def _seen(status: RunStatus, before: Seen, points: int) -> Seen:
    return Seen(
        status.rounds[-1].round_id if status.rounds else before.round_id,
        status.events[-1].number if status.events else before.event,
        status.outer_step,
        points,
    )
