"""The founding: which member sends the run's first parameters, how long it has for them, and what is taken from it.

Members take turns, in the order in which they attended. A member's turn ends, and what it sent is dropped, when

    it leaves              the next one is asked at once
    it brings nothing new  for STALL_S seconds, or so little that all of it would take longer than `longest_s`
    what it sends is bad   not what it announced, damaged, not finite

and somebody else attends. Then it is the last in line, and is asked again when its turn comes. Where nobody else attends, it is
waited for, also while only its control connection is broken: nothing is lost by that. What is here of its parameters stays
until another member is asked: it goes on where it broke off. Once all its bytes are here and right, they are the run's,
whatever becomes of its connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aggregator.control.attendance import Attendances
from aggregator.open_call import OpenCall
from aggregator.run_feed import Advised, RunFeed
from aggregator.storage.store import Store
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from editpb.messages import FoundHeader
from editpb.transport.chunks import Chunk, Reassembly

__all__ = ["STALL_S", "Founding", "Transfer", "Turn"]

STALL_S = 60.0  # to begin, and between two bytes that are new
_PATIENCE = 4.0  # int8 is a quarter of fp32: who is slower than this could not send a contribution before ceiling_s either


class Turn:
    """One member's turn to send the initial parameters."""

    def __init__(self, peer_id: str, now: float) -> None:
        self.peer_id, self.since = peer_id, now
        self.moved_at = now  # when bytes came that are new
        self.received_bytes = 0  # the most that was here: who begins again brings nothing new until there
        self.total_bytes = 0  # 0 before its first transfer
        self.digest = ""  # that the parameters are to have
        self.parts: list[Reassembly] = []  # what is here of them, one per fragment
        self.transfer: Transfer | None = None
        self.processing = False  # all bytes are here: what takes time now is not its fault
        self.accepted = False  # and they are right: they are being written

    def begin(self, schema: Schema, digest: str) -> None:
        """Make ready for these parameters; what is here of them already stays."""
        if digest != self.digest:
            self.parts = [Reassembly(f"fragment {f.name}", 4 * f.numel, 4 * f.numel) for f in schema.fragments]
            self.digest = digest
        self.total_bytes = 4 * schema.numel

    def go_on(self, before: Turn) -> None:
        """Take over what is here from the same member's turn before, if nobody was asked since."""
        self.digest, self.parts, self.received_bytes = before.digest, before.parts, before.received_bytes

    def forget(self) -> None:
        """Let go of what is here: it is bad, or it is the run's."""
        self.digest, self.parts = "", []


class Transfer(OpenCall):
    """One call of the founder's that brings parameters. It ends with a StaleError when the turn does."""

    def __init__(self, turn: Turn, schema: Schema, now: Callable[[], float]) -> None:
        super().__init__()
        self.turn, self.schema = turn, schema
        self._now = now

    @property
    def received_bytes(self) -> int:
        """What is here, over all calls of this turn: where the next chunk must begin."""
        return sum(part.received for part in self.turn.parts)

    def take(self, fragment_id: int, chunk: Chunk) -> None:
        """Append a chunk; the first byte of all begins anew. Raises RemoteProtocolError."""
        turn = self.turn
        if fragment_id == 0 and chunk.offset == 0:
            for part in turn.parts:
                part.clear()
        present = next((i for i, part in enumerate(turn.parts) if not part.complete), None)
        if fragment_id != present:
            raise RemoteProtocolError(f"a chunk of fragment {fragment_id} is out of turn")
        turn.parts[fragment_id].take(chunk)
        if (received := self.received_bytes) > turn.received_bytes:
            turn.received_bytes, turn.moved_at = received, self._now()

    def theta(self) -> list[Tensor]:
        """Return all fragments, fp32, once they are here."""
        return [torch.frombuffer(part.finish(), dtype=torch.float32) for part in self.turn.parts]


class Founding:
    """Chooses the founder among the members that attend, and takes its parameters. Used on the event loop.

    Args:
        now: monotonic seconds.
        changed: called when another member is asked.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        background: Background,
        attendances: Attendances,
        feed: RunFeed,
        now: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.turn: Turn | None = None
        self._before: Turn | None = None  # the last one, while nobody is asked
        self._config, self._store, self._background, self._attendances = config, store, background, attendances
        self._feed, self._now, self._changed = feed, now, changed
        self._line: dict[str, None] = {}  # the members that attend: who is to be asked next comes first
        self._told: set[str] = set()  # members of which the log has said that their turn came to nothing

    @property
    def founder(self) -> str | None:
        """The member that is asked for its parameters."""
        return self.turn.peer_id if self.turn is not None else None

    @property
    def waiting(self) -> list[str]:
        """The members that attend and are not asked, in the order of their turns."""
        return [peer_id for peer_id in self._line if peer_id != self.founder]

    @property
    def longest_s(self) -> float:
        """Seconds that the parameters may take in all when somebody else could send them."""
        return _PATIENCE * self._config.rounds.ceiling_s * self._config.sync.groups

    # ---- whose turn it is ------------------------------------------------------------------------------------------------

    def attended(self, peer_id: str) -> None:
        """A member attends a run without parameters."""
        self._line.setdefault(peer_id)
        if self.founder not in self._line:
            self._end_turn(f"{self.founder} is no longer here")

    def left(self, peer_id: str) -> None:
        """A member no longer attends."""
        self._line.pop(peer_id, None)
        if self.founder == peer_id and (self._line or not self._sends()):
            self._end_turn(f"{peer_id} is no longer here")

    def tick(self) -> None:
        """Pass the founding on when its founder is too slow and somebody else attends."""
        turn = self.turn
        if turn is not None and self.waiting and (reason := self._too_slow(turn)):
            self._pass_on(reason)

    def _sends(self) -> bool:
        return self.turn is not None and self.turn.transfer is not None and self.turn.transfer.open

    def _too_slow(self, turn: Turn) -> str:
        now = self._now()
        if turn.processing:
            return ""
        if now - turn.moved_at >= STALL_S:
            return f"brought nothing new of the initial parameters for {STALL_S:g} s"
        late_s = now - turn.since - STALL_S - self.longest_s * turn.received_bytes / max(turn.total_bytes, 1)
        return f"would bring the initial parameters in more than {self.longest_s:g} s" if late_s > 0 else ""

    def _pass_on(self, reason: str) -> None:
        turn = self.turn
        if turn is None or turn.accepted or not self.waiting:
            return
        self._line.pop(turn.peer_id, None)
        self._line[turn.peer_id] = None
        self._end_turn(f"{turn.peer_id} {reason}")
        if turn.peer_id not in self._told:
            self._told.add(turn.peer_id)
            self._feed.publish(Advised(turn.peer_id, f"{reason}; {self.founder} is asked to found the run now"))
        self._changed()

    def _end_turn(self, reason: str) -> None:
        """End the turn, if there is one, and give it to the first in line, to a live one where there is one."""
        turn = self.turn
        if turn is not None and turn.accepted:
            return
        self.turn, self._before = None, turn or self._before
        if turn is not None and turn.transfer is not None:
            turn.transfer.end(StaleError(f"{reason}; another member may found the run now"))
        members = self._attendances.membership.members
        live = (peer_id for peer_id in self._line if members[peer_id].live)
        if (peer_id := next(live, next(iter(self._line), None))) is not None:
            self.turn, before, self._before = Turn(peer_id, self._now()), self._before, None
            if before is not None and before.peer_id == peer_id:
                self.turn.go_on(before)

    def _end_if_gone(self, turn: Turn) -> None:
        if self.turn is turn and turn.peer_id not in self._line and not self._sends():
            self._end_turn(f"{turn.peer_id} is no longer here")

    def waiting_for(self) -> str:
        """Return in words who is waited for, for `status`."""
        turn = self.turn
        if turn is None:
            return "a first peer, which brings the initial parameters"
        if turn.processing:
            return f"the disk: the initial parameters of {turn.peer_id} are here"
        share = f", {turn.received_bytes / 1e6:.1f} of {turn.total_bytes / 1e6:.1f} MB are here" if turn.total_bytes else ""
        return f"{turn.peer_id}, asked for the initial parameters {self._now() - turn.since:.0f} s ago{share}"

    # ---- what it sends ---------------------------------------------------------------------------------------------------

    @contextmanager
    def transfer(self, peer_id: str, header: FoundHeader) -> Iterator[Transfer]:
        """Take the founder's parameters inside; a newer transfer of the same turn ends this one.

        Raises RefusedError for another peer, RemoteProtocolError, and StaleError inside as soon as the turn is over. An error
        of the founder's bytes ends its turn.
        """
        turn, attendance = self.turn, self._attendances.get(peer_id)
        if turn is None or turn.peer_id != peer_id or attendance is None:
            raise RefusedError(f"the founder is {self.founder}, not {peer_id}")
        if turn.accepted:
            raise StaleError(f"the parameters of {peer_id} are being written; look at the view")
        try:
            if attendance.schema.schema_hash != header.schema_hash:
                raise RemoteProtocolError("founding with another schema than the one announced")
            if turn.transfer is not None:
                turn.transfer.end(StaleError("a newer transfer of the initial parameters has begun"))
            turn.begin(attendance.schema, header.digest)
            turn.transfer = transfer = Transfer(turn, attendance.schema, self._now)
            with transfer:
                yield transfer
        except RemoteProtocolError as error:
            turn.forget()
            if self.turn is turn:
                self._pass_on(f"sent bad initial parameters ({error})")
            raise
        finally:
            self._end_if_gone(turn)

    async def accept(self, transfer: Transfer, theta: Sequence[Tensor], claimed_digest: str) -> OuterState:
        """Return outer step 0 with the founder's parameters; nothing is on disk yet, and no other member is asked any more.

        Raises RemoteProtocolError.
        """

        def work() -> OuterState:
            for fragment, part in zip(transfer.schema.fragments, theta, strict=False):
                if not bool(part.isfinite().all()):
                    raise RemoteProtocolError(f"the founder's parameters are not finite: {fragment.name}")
            outer = OuterState(transfer.schema, self._config, theta)
            if outer.digest != claimed_digest:
                raise RemoteProtocolError("the founder's parameters do not have the digest it claims")
            return outer

        turn = transfer.turn
        turn.processing = True
        try:
            outer = await self._background.in_worker(work)
            turn.accepted = True
            turn.forget()
        finally:
            turn.processing = turn.accepted
        return outer

    async def write(self, outer: OuterState) -> None:
        """Make outer step 0 durable. Raises StorageError: the run is not founded, and the founder is still asked."""
        try:
            await self._background.in_worker(self._store.found, outer)
        except StorageError:
            if (turn := self.turn) is not None:
                turn.accepted = turn.processing = False
                turn.moved_at = self._now()
                self._end_if_gone(turn)
            raise
