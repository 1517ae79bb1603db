"""What this rank contributes at present: its fragments, or its parts of them, on their way to one round.

Owns: the queue, the number of the attempt, the choice of the round that it names, at most two fragments in flight, sending
again what the coordinator may have lost, and giving up when the attempt is over. Shared state: every method but `_send` is
called under the bridge's lock. Must not know: what an outcome is.

A replica's contribution is taken only whole: from one attempt, all parts naming the round that rank 0's do. With S the run's
max_staleness:
- S = 0: a contribution is taken in its own round only. Rank 0 stays with the round it began to send to; another rank cannot
  know which one that is (it may have seen one that was lost meanwhile), so it follows to each newer round of the same outer
  step, until rank 0's decision settles the attempt.
- S > 0: a contribution outlives the round it names, and what is sent goes on under that name whatever round is open. The other
  ranks name what rank 0 says (`follow`). What is merged once is refused after that, so this rank may ask and send again: after
  a new connection (the coordinator may be another process) and a round that came to nothing (it may have been dropped with it).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from edit.errors import EditError, LocalProtocolError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.schema import Schema
from edit.records import Contribution
from editpb.identity import Identity
from editpb.messages import ContributionHeader
from peers.carriers.hub.data_calls import DataPlane, Wanted
from peers.carriers.hub.session import Sent, Session
from peers.carriers.io_thread import IoThread

__all__ = ["ATTEMPTS", "Uplink", "headers"]

ATTEMPTS = 1 << 20  # of one life of the replica; a later life's numbers start above
IN_FLIGHT = 2
Header = Callable[[Contribution, int, int], ContributionHeader]
Latest = Callable[[Wanted], Awaitable[int]]
_log = logging.getLogger(__name__)


def headers(identity: Identity, schema: Schema, rank: int) -> Header:
    """What makes the wire header of this rank's contribution for a round and an attempt."""

    def header(contribution: Contribution, round_id: int, attempt: int) -> ContributionHeader:
        payload = contribution.payload
        return ContributionHeader(
            run_id=identity.run_id,
            round_id=round_id,
            outer_step=contribution.outer_step,
            peer_id=identity.peer_id,
            fragment_id=contribution.fragment_id,
            schema_hash=schema.schema_hash,
            inner_steps=contribution.inner_steps,
            tokens=contribution.tokens,
            codec=payload.codec,
            numel=payload.numel,
            total_bytes=memoryview(payload.data).nbytes,
            rank=rank,
            attempt=attempt,
            boxes=contribution.boxes,
        )

    return header


@dataclass(slots=True)
class _Attempt:
    """One contribution: what this rank has of the fragments; it names no round before one is open for it.

    kept: what may have to be sent again; begun: the fragments of which the coordinator may hold bytes; seen: the connection and
    the lost round after which it was sent.
    """

    sent: Sent
    number: int
    queue: deque[Contribution] = field(default_factory=deque)
    fragment_ids: set[int] = field(default_factory=set)
    kept: list[Contribution] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    sending: set[asyncio.Task[None]] = field(default_factory=set)
    seen: tuple[int, int] = (0, 0)


class Uplink:
    """Sends contributions in the background.

    header: the wire header of a contribution for a round and an attempt; latest: asks the coordinator for its outer step;
    attempt: number of the first one, equal at all ranks of the replica; follows: this is not rank 0.
    """

    def __init__(
        self,
        bridge: IoThread,
        session: Session,
        data: DataPlane,
        header: Header,
        latest: Latest,
        *,
        attempt: int = 0,
        follows: bool = False,
    ) -> None:
        self._bridge = bridge
        self._session = session
        self._data = data
        self._header = header
        self._latest = latest
        self._follows = follows
        self._number = attempt
        self._attempt: _Attempt | None = None
        self._last_round = 0
        self._named = 0  # S > 0: by rank 0, for the present attempt or the next one
        self._abandoned: set[asyncio.Task[None]] = set()
        self._refused: RefusedError | None = None

    @property
    def refused(self) -> RefusedError | None:
        """The coordinator's refusal for good of a contribution, if there was one."""
        return self._refused

    @property
    def sent(self) -> Sent | None:
        """The contribution that has no outcome yet, as far as this rank knows."""
        return self._attempt.sent if self._attempt is not None else None

    def sent_to(self, outer_step: int) -> Sent | None:
        """The contribution to the advance from `outer_step`: with S = 0 one that was computed against it, else any."""
        sent = self.sent
        return sent if sent is not None and (self._session.carries or sent.outer_step == outer_step) else None

    def add(self, contribution: Contribution) -> None:
        """Queue one fragment, or this rank's part of it. Raises LocalProtocolError for one that is queued already."""
        attempt = self._attempt
        if attempt is None or attempt.sent.outer_step != contribution.outer_step:
            self._drop()
            attempt = self._attempt = _Attempt(Sent(0, contribution.outer_step), self._number)
        if contribution.fragment_id in attempt.fragment_ids:
            raise LocalProtocolError(f"fragment {contribution.fragment_id} was contributed twice to one attempt")
        attempt.fragment_ids.add(contribution.fragment_id)
        if contribution.payload.numel == 0:
            return  # other ranks own this fragment
        attempt.queue.append(contribution)
        if self._follows or self._session.carries:
            attempt.kept.append(contribution)

    def withdraw(self, outer_step: int) -> bool:
        """Take back a contribution of which nothing was sent; False when there is none."""
        sent = self.sent_to(outer_step)
        if sent is None or sent.round_id != 0:
            return False
        self._drop()
        return True

    def settle(self, round_id: int) -> None:
        """The attempt has its outcome, which all ranks know: stop sending; the next one goes to a round newer than `round_id`.

        round_id: what rank 0's named, or 0.
        """
        self._drop()
        self._last_round = max(self._last_round, round_id)
        self._number += 1

    def _drop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._abandoned |= attempt.sending
            if not self._follows:
                self._last_round = max(self._last_round, attempt.sent.round_id)

    # S > 0: what the ranks tell each other.

    def proposal(self, outer_step: int) -> int:
        """At rank 0: the round that all ranks are to name, now or with the next contribution; 0: none is open."""
        sent = self.sent
        return sent.round_id if sent and sent.round_id else self._session.open_round(outer_step, self._last_round)

    def follow(self, named: int, refused: Sent | None) -> None:
        """named: rank 0's proposal; refused: the attempt as a rank has it whose part the coordinator would not take."""
        self._named = named
        if refused is not None and self._attempt is not None:
            self._refuse(self._attempt, refused.refused_at, refused.reason)

    # Sending.

    def advance(self) -> None:
        """Start what can be started (loop's thread); called whenever something changed."""
        while self._abandoned:
            self._abandoned.pop().cancel()
        attempt = self._attempt
        if attempt is None:
            return
        self._choose_round(attempt)
        if attempt.sent.round_id == 0 or not self._wanted(attempt, attempt.sent.round_id):
            return
        if self._session.carries:
            self._offer_again(attempt)
        while attempt.queue and len(attempt.sending) < IN_FLIGHT:
            contribution = attempt.queue.popleft()
            task = self._bridge.start(self._send(attempt, attempt.sent.round_id, contribution))
            attempt.sending.add(task)
            task.add_done_callback(lambda done: self._bridge.change(lambda: self._done(attempt, done)))

    def _choose_round(self, attempt: _Attempt) -> None:
        named = attempt.sent.round_id
        if self._session.carries:
            if named == 0:
                attempt.sent = attempt.sent._replace(round_id=self._first_round(attempt))
            return
        if named != 0 and not self._follows:
            return
        newer = self._session.open_round(attempt.sent.outer_step, max(self._last_round, named))
        if newer == 0:
            return
        if named != 0:
            while attempt.sending:
                attempt.sending.pop().cancel()
            attempt.queue = deque(attempt.kept)
        attempt.sent = attempt.sent._replace(round_id=newer)

    def _first_round(self, attempt: _Attempt) -> int:
        if self._named > self._last_round:
            return self._named
        return 0 if self._follows else self._session.open_round(attempt.sent.outer_step, self._last_round)

    def _offer_again(self, attempt: _Attempt) -> None:
        """Queue what the coordinator may not have any more; it answers with what it has."""
        seen = self._session.connections, self._session.aborted_since(attempt.sent.round_id)
        if self._session.view is None or seen == attempt.seen:
            return
        if attempt.begun and (attempt.sending or attempt.queue):
            return  # looked at again once these are through
        if attempt.begun:
            attempt.queue = deque(attempt.kept)
        attempt.seen = seen

    def _wanted(self, attempt: _Attempt, round_id: int) -> bool:
        current = attempt is self._attempt and attempt.sent.round_id == round_id
        return current and attempt.sent.refused_at is None and self._session.takes(round_id)

    def _done(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        attempt.sending.discard(task)
        if not task.cancelled():
            self.advance()

    async def _send(self, attempt: _Attempt, round_id: int, contribution: Contribution) -> None:
        header = self._header(contribution, round_id, attempt.number)
        data, again = memoryview(contribution.payload.data).cast("B"), contribution.fragment_id in attempt.begun
        attempt.begun.add(contribution.fragment_id)

        def wanted() -> bool:
            return self._bridge.read(lambda: self._wanted(attempt, round_id))

        try:
            await self._data.contribute(header, data, wanted, resuming=again and self._session.carries)
        except EditError as error:
            reached = await self._reached(error, wanted) if self._session.carries else None
            self._bridge.change(partial(self._failed, attempt, contribution, header, error, reached))

    async def _reached(self, error: EditError, wanted: Wanted) -> int | None:
        """The run's outer step at or after the refusal of a contribution; None: it is not refused, or the step is not known."""
        if not isinstance(error, StaleError | RemoteProtocolError):
            return None
        try:
            return await self._latest(wanted)
        except EditError:
            return None

    def _failed(
        self, attempt: _Attempt, contribution: Contribution, header: ContributionHeader, error: EditError, reached: int | None
    ) -> None:
        """The outcome still comes from the view: the round ends with or without this fragment.

        With S > 0 there need not be another round: it is sent again with the next news, unless it was refused.
        """
        level = logging.WARNING if isinstance(error, RemoteProtocolError) else logging.INFO
        _log.log(level, "round %d: fragment %d was not taken: %s", header.round_id, header.fragment_id, error)
        if isinstance(error, RefusedError):
            self._refused = self._refused or error
        if not self._session.carries:
            if attempt.sent.round_id == header.round_id:
                attempt.queue.clear()
        elif reached is not None:
            self._refuse(attempt, reached, str(error))
        elif isinstance(error, TransportError | StaleError | RemoteProtocolError):
            attempt.seen = (0, 0)

    def _refuse(self, attempt: _Attempt, reached: int | None, reason: str) -> None:
        attempt.queue.clear()
        if attempt.sent.refused_at is None:
            attempt.sent = attempt.sent._replace(refused_at=reached, reason=reason)
