"""What this rank contributes at present: its fragments, or its shards of them, on their way to one round.

The uplink queues the fragments, chooses the round that they name, sends the bytes of at most two at a time, sends again what
the coordinator may have lost, and gives up when the attempt is over. Its state changes on the loop's thread only, under the
lock of `IoThread`; the main thread reads it there.

A replica's contribution is taken only whole: from one attempt, all shards naming the round that rank 0's do. With S the run's
max_staleness:
- S = 0: a contribution is taken in its own round only. The other ranks follow rank 0 (`Session.name_round`), until its decision
  ends the attempt.
- S > 0: a contribution outlives the round it names, and what is sent goes on under that name whatever round is open. The other
  ranks name what rank 0 says (`follow`). What is merged once is refused after that, so this rank may ask and send again: after
  a new connection (the coordinator may be another process) and a round that came to nothing (it may have been dropped with it).

In a swarm the aggregator moves from host to host, and the contribution FOLLOWS it: once the round it names is of an earlier
host, it is named anew and all of it is sent again. So what was sent is kept until the outcome, at rank 0, too. That is the
encoded contribution, which `edit.codecs.error_feedback` has until then as well, unless training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from edit.errors import EditError, LocalProtocolError, OutdatedError, RefusedError, RemoteProtocolError, TransportError
from edit.fragments.schema import Schema
from edit.records import Contribution, round_number
from editpb.identity import Identity
from editpb.messages import ContributionHeader
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.hub.session import Sent, Session
from peers.carriers.io_thread import IoThread

__all__ = ["ATTEMPTS", "RoundContext", "Sign", "Stage", "Uplink", "as_it_is"]

ATTEMPTS = 1 << 20  # of one life of the replica; a later life's numbers start above
SENDING = 2  # fragments whose bytes go out at a time
ON_THE_WAY = 16  # with those whose receipt is still on its way back; of the 32 calls that one connection may have
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What a contribution is sent as; all ranks of a replica have the same, but for `rank`."""

    run_id: str
    peer_id: str
    round_id: int  # the round that the contribution names
    outer_step: int  # of the outer parameters that it was computed against
    attempt: int  # counts this peer's contributions
    rank: int


Stage = Callable[[RoundContext, Contribution], Contribution]
"""Turns a contribution into what is sent, once its round is known and before its header is made: masks it, signs it.

Called on the loop's thread, once for each fragment and round: what is sent again for the same round is the same bytes. It may
replace the payload and nothing else.
"""


Sign = Callable[[ContributionHeader, memoryview], ContributionHeader]
"""Returns a header with the signature of it and of the bytes: `editpb.signed_contributions.ContributionSigner`."""


def as_it_is(context: RoundContext, contribution: Contribution) -> Contribution:
    """Return the contribution unchanged: the `Stage` of a run without masks or signatures."""
    return contribution


@dataclass(slots=True)
class _Attempt:
    """One contribution of this peer, as far as this rank has it."""

    sent: Sent  # as the session knows it; names no round before one is open for it
    number: int
    masked: bool = False  # it is for the round that it names, and for no other
    queue: deque[Contribution] = field(default_factory=deque)  # still to be sent
    fragment_ids: set[int] = field(default_factory=set)  # queued so far
    kept: list[Contribution] = field(default_factory=list)  # what may have to be sent again
    staged: dict[int, Contribution] = field(default_factory=dict)  # by fragment: what is sent to the round that it names
    signed: dict[int, ContributionHeader] = field(default_factory=dict)  # likewise: a retry has the same signature
    begun: set[int] = field(default_factory=set)  # the fragments of which the coordinator may hold bytes
    sending: dict[asyncio.Task[None], int] = field(default_factory=dict)  # until the receipt; the bytes of each
    unsent: set[asyncio.Task[None]] = field(default_factory=set)  # of these, until all bytes are on their way
    seen: tuple[int, int] = (0, 0)  # the connection and the lost round after which it was sent


class Uplink:
    """Sends contributions in the background.

    Args:
        io: the I/O thread.
        session: the view of the run that decides which round is open.
        data: the calls that carry the bytes.
        identity: this peer's.
        schema: of the model.
        rank: this rank in its replica; rank 0 chooses the round.
        attempt: number of the first attempt, equal at all ranks of the replica.
        stage: applied to each contribution once its round is known.
        sign: applied to each header; None: the run's contributions are not signed.
        delivered: told of each shard of which the coordinator has said that all of it is there.
        refused: awaited when the coordinator refuses a contribution for good, before this peer goes on no longer.
    """

    def __init__(
        self,
        io: IoThread,
        session: Session,
        data: DataCalls,
        identity: Identity,
        schema: Schema,
        *,
        rank: int = 0,
        attempt: int = 0,
        stage: Stage = as_it_is,
        sign: Sign | None = None,
        delivered: Callable[[ContributionHeader], object] = lambda header: None,
        refused: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._io = io
        self._session = session
        self._data = data
        self._identity = identity
        self._schema = schema
        self._rank = rank
        self._number = attempt
        self._stage, self._sign, self._delivered, self._before_leaving = stage, sign, delivered, refused
        self.position = 0  # the outer step that the caller last asked about
        self._attempt: _Attempt | None = None
        self._last_round = 0
        self._named = 0  # S > 0: by rank 0, for the present attempt or the next one
        self._refused: RefusedError | None = None

    # ---- what either thread may read ---------------------------------------------------------------------------------------

    @property
    def refused(self) -> RefusedError | None:
        """The coordinator's refusal for good of a contribution, if there was one."""
        return self._refused

    @property
    def sent(self) -> Sent | None:
        """The contribution that has no outcome yet, as far as this rank knows."""
        return self._attempt.sent if self._attempt is not None else None

    @property
    def sending(self) -> bool:
        """Whether fragments of the contribution are queued or on their way."""
        return self._attempt is not None and bool(self._attempt.queue or self._attempt.sending)

    def sent_to(self, outer_step: int) -> Sent | None:
        """Return the contribution to the advance from `outer_step`: with S = 0 one that was computed against it, else any."""
        sent = self.sent
        return sent if sent is not None and (self._session.carries or sent.outer_step == outer_step) else None

    def proposal(self, outer_step: int) -> int:
        """At rank 0, S > 0: return the round that all ranks are to name, now or with the next contribution; 0: none is open."""
        sent = self.sent
        if sent is None or not sent.round_id:
            return self._session.open_round(outer_step, self._last_round)
        return self._session.name_round(sent, self._last_round, outer_step)

    # ---- what changes it (loop's thread) -----------------------------------------------------------------------------------

    def add(self, contribution: Contribution, round_id: int = 0) -> None:
        """Queue one fragment, or this rank's shard of it. Raises LocalProtocolError for one that is queued already.

        round_id: the only round that it may be sent to, since it is masked for that; 0: the one that will be open for it.
        """
        attempt = self._attempt
        other_round = attempt is not None and round_id not in (0, attempt.sent.round_id)
        if attempt is None or other_round or attempt.sent.outer_step != contribution.outer_step:
            self._drop()
            attempt = self._attempt = _Attempt(Sent(round_id, contribution.outer_step), self._number, round_id > 0)
        if contribution.fragment_id in attempt.fragment_ids:
            raise LocalProtocolError(f"fragment {contribution.fragment_id} was contributed twice to one attempt")
        attempt.fragment_ids.add(contribution.fragment_id)
        if contribution.payload.numel == 0:
            return  # other ranks own this fragment
        attempt.queue.append(contribution)
        if not attempt.masked and (self._rank or self._session.carries or self._session.follows):
            attempt.kept.append(contribution)

    def withdraw(self, outer_step: int) -> bool:
        """Take back a contribution of which nothing was sent; return False when there is none."""
        sent = self.sent_to(outer_step)
        if sent is None or sent.round_id != 0:
            return False
        self._drop()
        return True

    def end_attempt(self, round_id: int) -> None:
        """Stop sending: all ranks know the attempt's outcome. The next attempt goes to a round newer than `round_id`.

        round_id: what rank 0's contribution named, or 0.
        """
        self._drop()
        self._last_round = max(self._last_round, round_id)
        self._number += 1

    def follow(self, named: int, refused: Sent | None) -> None:
        """S > 0: take what the ranks have agreed on.

        named: rank 0's `proposal`; refused: the attempt as a rank has it whose shard the coordinator would not take.
        """
        self._named = named
        if refused is not None and self._attempt is not None:
            self._refuse(self._attempt, refused.refused_at, refused.reason)

    def advance(self) -> None:
        """Start what can be started; called whenever something changed."""
        attempt = self._attempt
        if attempt is None:
            return
        self._choose_round(attempt)
        if attempt.sent.round_id == 0 or not self._wanted(attempt, attempt.sent.round_id):
            return
        if self._session.carries:
            self._offer_again(attempt)
        while attempt.queue and len(attempt.unsent) < SENDING and len(attempt.sending) < ON_THE_WAY:
            size = memoryview(attempt.queue[0].payload.data).nbytes
            if attempt.sending and sum(attempt.sending.values()) + size > self._session.ahead_bytes:
                break
            self._begin(attempt, attempt.queue.popleft(), size)

    def _begin(self, attempt: _Attempt, contribution: Contribution, size: int) -> None:
        """Send a fragment; the one after it follows its bytes, and not its receipt a round trip later."""

        def sent() -> None:
            self._io.change(lambda: self._all_sent(attempt, task))

        task = self._io.start(self._send(attempt, attempt.sent.round_id, contribution, sent))
        attempt.sending[task] = size
        attempt.unsent.add(task)
        task.add_done_callback(lambda done: self._io.change(lambda: self._done(attempt, done)))

    def _drop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        for task in attempt.sending:
            task.cancel()
        if self._rank == 0:
            self._last_round = max(self._last_round, attempt.sent.round_id)

    def _choose_round(self, attempt: _Attempt) -> None:
        if attempt.masked:
            return
        before, leads = attempt.sent.round_id, self._rank == 0
        round_id = self._session.name_round(attempt.sent, self._last_round, self.position, leads=leads, named=self._named)
        if round_id == before:
            return
        if before:
            while attempt.sending:
                attempt.sending.popitem()[0].cancel()
            attempt.unsent.clear()
            attempt.queue = deque(attempt.kept)
            attempt.staged.clear()
            attempt.signed.clear()
            attempt.begun.clear()
        attempt.sent = attempt.sent._replace(round_id=round_id)

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

    def _all_sent(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        attempt.unsent.discard(task)
        self.advance()

    def _done(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        attempt.sending.pop(task, None)
        attempt.unsent.discard(task)
        if not task.cancelled():
            self.advance()

    async def _send(self, attempt: _Attempt, round_id: int, contribution: Contribution, sent: Callable[[], object]) -> None:
        header, data = self._prepare(attempt, round_id, contribution)
        again = contribution.fragment_id in attempt.begun
        attempt.begun.add(contribution.fragment_id)
        carries = self._session.carries
        wanted = partial(self._wanted, attempt, round_id)
        try:
            await self._data.contribute(
                header, data, wanted, resuming=again and carries, sent=sent, ahead=lambda: self._session.ahead_bytes
            )
            self._delivered(header)
        except EditError as error:
            reached = await self._step_of_refusal(error, wanted) if carries else None
            if isinstance(error, RefusedError) and self._before_leaving is not None:
                await self._before_leaving()
            self._io.change(partial(self._failed, attempt, header, error, reached))

    def _prepare(self, attempt: _Attempt, round_id: int, contribution: Contribution) -> tuple[ContributionHeader, memoryview]:
        """Return the header and the bytes that are sent, after `stage`."""
        identity, outer_step, fragment_id = self._identity, contribution.outer_step, contribution.fragment_id
        if fragment_id not in attempt.staged:
            context = RoundContext(
                run_id=identity.run_id,
                peer_id=identity.peer_id,
                round_id=round_id,
                outer_step=outer_step,
                attempt=attempt.number,
                rank=self._rank,
            )
            attempt.staged[fragment_id] = self._stage(context, contribution)
        payload = attempt.staged[fragment_id].payload
        data = memoryview(payload.data).cast("B")
        header = ContributionHeader(
            run_id=identity.run_id,
            round_id=round_id,
            outer_step=outer_step,
            peer_id=identity.peer_id,
            fragment_id=fragment_id,
            schema_hash=self._schema.schema_hash,
            inner_steps=contribution.inner_steps,
            tokens=contribution.tokens,
            codec=payload.codec,
            numel=payload.numel,
            total_bytes=data.nbytes,
            rank=self._rank,
            attempt=attempt.number,
            boxes=contribution.boxes,
            norm=contribution.norm,
        )
        if self._sign is None:
            return header, data
        if fragment_id not in attempt.signed:
            attempt.signed[fragment_id] = self._sign(header, data)
        return attempt.signed[fragment_id], data

    async def _step_of_refusal(self, error: EditError, wanted: Callable[[], bool]) -> int | None:
        """Return the run's outer step at or after the refusal of a contribution; None: not refused, or the step is unknown."""
        if not isinstance(error, OutdatedError | RemoteProtocolError):
            return None
        try:
            return (await self._data.describe(self._schema, wanted)).outer_step  # views may tell of it later
        except EditError:
            return None

    def _failed(self, attempt: _Attempt, header: ContributionHeader, error: EditError, reached: int | None) -> None:
        """A fragment was not taken. The outcome still comes from the view: the round ends with or without it.

        With S > 0 there need not be another round: the fragment is sent again with the next news, unless it was refused.
        """
        level = logging.WARNING if isinstance(error, RemoteProtocolError) else logging.INFO
        _log.log(level, "round %d: fragment %d was not taken: %s", round_number(header.round_id), header.fragment_id, error)
        if isinstance(error, RefusedError):
            self._refused = self._refused or error
        if not self._session.carries:
            if attempt.sent.round_id == header.round_id:
                attempt.queue.clear()
        elif reached is not None and self._is_current(header.round_id):
            self._refuse(attempt, reached, str(error))
        elif isinstance(error, TransportError | OutdatedError | RemoteProtocolError):
            attempt.seen = (0, 0)

    def _is_current(self, round_id: int) -> bool:
        """Whether who refused it is who serves that round: in a swarm it may have been the next host."""
        return not self._session.follows or (self._session.view is not None and not self._session.outlived(round_id))

    def _refuse(self, attempt: _Attempt, reached: int | None, reason: str) -> None:
        attempt.queue.clear()
        if attempt.sent.refused_at is None:
            attempt.sent = attempt.sent._replace(refused_at=reached, reason=reason)
