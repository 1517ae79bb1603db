"""What this rank contributes at present: its fragments, or its parts of them, on their way to one round.

Owns: the queue, the number of the attempt, the choice of the round (the open one for the right outer step), at most two
fragments in flight, and giving up when the round is over. Shared state: every method but `_send` is called under the bridge's
lock. Must not know: what an outcome is.

A round takes a replica's contribution only whole, from one attempt, in the round that rank 0 contributes to. Rank 0 stays with
the round it began to send to; another rank cannot know which one that is (it may have seen one that was lost meanwhile), so it
follows to each newer round of the same outer step, until rank 0's decision settles the attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from edit.errors import EditError, LocalProtocolError, RefusedError, RemoteProtocolError
from edit.records import Contribution
from editpb.messages import ContributionHeader
from peers.bridge import Bridge
from peers.data_plane import DataPlane
from peers.session import Session

__all__ = ["ATTEMPTS", "Uplink"]

ATTEMPTS = 1 << 20  # of one life of the replica; a later life's numbers start above
IN_FLIGHT = 2
Header = Callable[[Contribution, int, int], ContributionHeader]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """One contribution: what this rank has of the fragments for one outer step; round_id 0 until a round is open for them."""

    outer_step: int
    number: int
    round_id: int = 0
    queue: deque[Contribution] = field(default_factory=deque)
    fragment_ids: set[int] = field(default_factory=set)
    kept: list[Contribution] = field(default_factory=list)  # to be sent again, should this rank follow to another round
    sending: set[asyncio.Task[None]] = field(default_factory=set)


class Uplink:
    """Sends contributions in the background.

    header: the wire header of a contribution for a round and an attempt; attempt: number of the first one, equal at all ranks
    of the replica; follows: this is not rank 0.
    """

    def __init__(
        self, bridge: Bridge, session: Session, data: DataPlane, header: Header, *, attempt: int = 0, follows: bool = False
    ) -> None:
        self._bridge = bridge
        self._session = session
        self._data = data
        self._header = header
        self._follows = follows
        self._number = attempt
        self._attempt: _Attempt | None = None
        self._last_round = 0
        self._abandoned: set[asyncio.Task[None]] = set()
        self._refused: RefusedError | None = None

    @property
    def refused(self) -> RefusedError | None:
        """The coordinator's refusal for good of a contribution, if there was one."""
        return self._refused

    def add(self, contribution: Contribution) -> None:
        """Queue one fragment, or this rank's part of it. Raises LocalProtocolError for one that is queued already."""
        attempt = self._attempt
        if attempt is None or attempt.outer_step != contribution.outer_step:
            self._drop()
            attempt = self._attempt = _Attempt(contribution.outer_step, self._number)
        if contribution.fragment_id in attempt.fragment_ids:
            raise LocalProtocolError(f"fragment {contribution.fragment_id} was contributed twice to one attempt")
        attempt.fragment_ids.add(contribution.fragment_id)
        if contribution.payload.numel == 0:
            return  # other ranks own this fragment
        attempt.queue.append(contribution)
        if self._follows:
            attempt.kept.append(contribution)

    def round_of(self, outer_step: int) -> int:
        """The round to which this rank has begun to contribute for `outer_step`, or 0."""
        return self._attempt.round_id if self._attempt is not None and self._attempt.outer_step == outer_step else 0

    @property
    def awaited(self) -> int | None:
        """The outer step of the contribution whose outcome is awaited, or None."""
        return self._attempt.outer_step if self._attempt is not None else None

    def withdraw(self, outer_step: int) -> bool:
        """Take back a contribution of which nothing was sent; False when there is none."""
        attempt = self._attempt
        if attempt is None or attempt.outer_step != outer_step or attempt.round_id != 0:
            return False
        self._drop()
        return True

    def settle(self, round_id: int) -> None:
        """The attempt has its outcome, which all ranks know: stop sending; the next one goes to a round newer than `round_id`.

        round_id: what rank 0 had contributed to, or 0.
        """
        self._drop()
        self._last_round = max(self._last_round, round_id)
        self._number += 1

    def _drop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._abandoned |= attempt.sending
            if not self._follows:
                self._last_round = max(self._last_round, attempt.round_id)

    def advance(self) -> None:
        """Start what can be started (loop's thread); called whenever something changed."""
        while self._abandoned:
            self._abandoned.pop().cancel()
        attempt = self._attempt
        if attempt is None:
            return
        self._choose_round(attempt)
        if attempt.round_id == 0 or not self._wanted(attempt, attempt.round_id):
            return
        while attempt.queue and len(attempt.sending) < IN_FLIGHT:
            task = self._bridge.start(self._send(attempt, attempt.round_id, attempt.queue.popleft()))
            attempt.sending.add(task)
            task.add_done_callback(lambda done: self._bridge.change(lambda: self._sent(attempt, done)))

    def _choose_round(self, attempt: _Attempt) -> None:
        if attempt.round_id != 0 and not self._follows:
            return
        newer = self._session.open_round(attempt.outer_step, max(self._last_round, attempt.round_id))
        if newer == 0:
            return
        if attempt.round_id != 0:
            while attempt.sending:
                attempt.sending.pop().cancel()
            attempt.queue = deque(attempt.kept)
        attempt.round_id = newer

    def _wanted(self, attempt: _Attempt, round_id: int) -> bool:
        return attempt is self._attempt and attempt.round_id == round_id and self._session.takes(round_id)

    def _sent(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        attempt.sending.discard(task)
        if not task.cancelled():
            self.advance()

    async def _send(self, attempt: _Attempt, round_id: int, contribution: Contribution) -> None:
        header = self._header(contribution, round_id, attempt.number)
        try:
            await self._data.contribute(
                header,
                memoryview(contribution.payload.data).cast("B"),
                lambda: self._bridge.read(lambda: self._wanted(attempt, round_id)),
            )
        except EditError as error:
            self._bridge.change(partial(self._failed, attempt, header, error))

    def _failed(self, attempt: _Attempt, header: ContributionHeader, error: EditError) -> None:
        """The outcome still comes from the view: the round ends with or without this fragment."""
        level = logging.WARNING if isinstance(error, RemoteProtocolError) else logging.INFO
        _log.log(level, "round %d: fragment %d was not taken: %s", header.round_id, header.fragment_id, error)
        if attempt.round_id == header.round_id:
            attempt.queue.clear()
        if isinstance(error, RefusedError):
            self._refused = self._refused or error
