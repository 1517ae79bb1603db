"""What this peer contributes at present: its fragments on their way to one round.

Owns: the queue, the choice of the round (the open one for the right outer step), at most two fragments in flight, and giving up
when the round is over. Shared state: every method but `_send` is called under the bridge's
lock. Must not know: what an outcome is.
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

__all__ = ["Uplink"]

IN_FLIGHT = 2
Header = Callable[[Contribution, int], ContributionHeader]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """One contribution: all fragments for one outer step; round_id 0 until a round is open for them."""

    outer_step: int
    round_id: int = 0
    queue: deque[Contribution] = field(default_factory=deque)
    fragment_ids: set[int] = field(default_factory=set)
    sending: set[asyncio.Task[None]] = field(default_factory=set)


class Uplink:
    """Sends contributions in the background. `header` makes the wire header of one fragment for a round."""

    def __init__(self, bridge: Bridge, session: Session, data: DataPlane, header: Header) -> None:
        self._bridge = bridge
        self._session = session
        self._data = data
        self._header = header
        self._attempt: _Attempt | None = None
        self._last_round = 0
        self._abandoned: set[asyncio.Task[None]] = set()
        self._refused: RefusedError | None = None

    @property
    def refused(self) -> RefusedError | None:
        """The coordinator's refusal for good of a contribution, if there was one."""
        return self._refused

    def add(self, contribution: Contribution) -> None:
        """Queue one fragment. Raises LocalProtocolError for one that is queued already."""
        attempt = self._attempt
        if attempt is None or attempt.outer_step != contribution.outer_step:
            self.drop()
            attempt = self._attempt = _Attempt(contribution.outer_step)
        if contribution.fragment_id in attempt.fragment_ids:
            raise LocalProtocolError(f"fragment {contribution.fragment_id} was contributed twice to one attempt")
        attempt.fragment_ids.add(contribution.fragment_id)
        attempt.queue.append(contribution)

    def round_of(self, outer_step: int) -> int:
        """The round to which this peer has begun to contribute for `outer_step`, or 0."""
        return self._attempt.round_id if self._attempt is not None and self._attempt.outer_step == outer_step else 0

    def withdraw(self, outer_step: int) -> bool:
        """Take back a contribution of which nothing was sent; False when there is none."""
        attempt = self._attempt
        if attempt is None or attempt.outer_step != outer_step or attempt.round_id != 0:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """The attempt has its outcome: stop sending; the next contribution goes to a newer round."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._last_round = max(self._last_round, attempt.round_id)
            self._abandoned |= attempt.sending

    def advance(self) -> None:
        """Start what can be started (loop's thread); called whenever something changed."""
        while self._abandoned:
            self._abandoned.pop().cancel()
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.round_id == 0:
            attempt.round_id = self._session.open_round(attempt.outer_step, self._last_round)
        if attempt.round_id == 0 or not self._wanted(attempt):
            return
        while attempt.queue and len(attempt.sending) < IN_FLIGHT:
            task = self._bridge.start(self._send(attempt, attempt.queue.popleft()))
            attempt.sending.add(task)
            task.add_done_callback(lambda done: self._bridge.change(lambda: self._sent(attempt, done)))

    def _wanted(self, attempt: _Attempt) -> bool:
        return attempt is self._attempt and self._session.takes(attempt.round_id)

    def _sent(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        attempt.sending.discard(task)
        if not task.cancelled():
            self.advance()

    async def _send(self, attempt: _Attempt, contribution: Contribution) -> None:
        header = self._header(contribution, attempt.round_id)
        try:
            await self._data.contribute(
                header,
                memoryview(contribution.payload.data).cast("B"),
                lambda: self._bridge.read(lambda: self._wanted(attempt)),
            )
        except EditError as error:
            self._bridge.change(partial(self._failed, attempt, contribution.fragment_id, error))

    def _failed(self, attempt: _Attempt, fragment_id: int, error: EditError) -> None:
        """The outcome still comes from the view: the round ends with or without this fragment."""
        level = logging.WARNING if isinstance(error, RemoteProtocolError) else logging.INFO
        _log.log(level, "round %d: fragment %d was not taken: %s", attempt.round_id, fragment_id, error)
        attempt.queue.clear()
        if isinstance(error, RefusedError):
            self._refused = self._refused or error
