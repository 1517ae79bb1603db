"""The run in one process: who attends, who founds it, what each of them sees.

Owns: attendance (one stream per rank), the founding, the views. Decides nothing about leases
(`aggregator.control.membership`); rounds and contributions are the exchange's (`aggregator.data.round_runner`), what is
fetched is the downlink's. Must not know: gRPC, merging. Everything here runs on the event loop.

A peer's replica has one or more ranks. Rank 0 is the member: it holds the lease, reports, may found the run. The others attend
for the views only; when the stream of one of them breaks, the replica is lost to the open round at once, until rank 0 reports
again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aggregator.control.membership import REPLACED, Change, Membership, digest_mismatch
from aggregator.control.pace_advice import PaceAdvice, impossible
from aggregator.data.published import Downlink, Head
from aggregator.data.round_runner import RoundRunner
from aggregator.resources import Resources
from edit.config.run import RunConfig
from edit.errors import ConfigError, EvictedError, RefusedError, RemoteProtocolError, StaleError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from edit.records import Commit
from edit.rounds import events
from edit.rounds.events import Phase
from edit.rounds.machine import RoundMachine
from editpb.messages import FoundHeader, Heartbeat, PeerState, RunPhase, View

__all__ = ["Attendance", "Run"]

_log = logging.getLogger(__name__)

_PHASES = {
    Phase.GATHERING: RunPhase.GATHERING,
    Phase.COLLECTING: RunPhase.COLLECTING,
    Phase.COMMITTING: RunPhase.COMMITTING,
    Phase.PAUSED: RunPhase.PAUSED,
    Phase.FINISHED: RunPhase.FINISHED,
}
_PAUSED = "paused by the operator; `edit-coordinator resume` lets it go on"
_TICK_S = 0.25  # how often leases and deadlines are looked at
_PEER_LINE_S = 1.0  # at most one metrics line per peer in this time


@dataclass(slots=True)
class Attendance:
    """One rank's open stream. `changed` is set when the view changed; `expelled` holds the last message, if it must go.

    number: of the membership's attendance; 0 for ranks other than 0, which are no members.
    """

    peer_id: str
    rank: int
    number: int
    schema: Schema
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expelled: EvictedError | RefusedError | None = None
    over: bool = False  # the coordinator stops; the peer dials again
    resync: str = ""
    last_line: float = -math.inf

    def expel(self, error: EvictedError | RefusedError) -> None:
        """Its stream ends with this."""
        self.expelled = error
        self.changed.set()


class Run:
    """See the module's text. Call `start` once on the event loop, `close` at the end."""

    def __init__(self, run_id: str, config: RunConfig, resources: Resources, *, first_round_id: int) -> None:
        self.run_id, self.config, self.metrics, self.members = run_id, config, resources.metrics, resources.members
        self.clock = resources.clock
        self.membership = Membership(config.membership)
        self.outer: OuterState | None = None
        self.finished = asyncio.Event()
        self._resources = resources
        self._first_round_id = first_round_id
        self._published: Downlink | None = None
        self._rounds: RoundRunner | None = None
        self._attendances: dict[tuple[str, int], Attendance] = {}
        self._founder: str | None = None
        self._sequence = 0
        self._advice = PaceAdvice(config)

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the outer state, if there is any, and begin to watch the clock. Raises StorageError."""
        background = self._resources.background
        recovered = await background.in_worker(self._resources.store.recover)
        if recovered is not None:
            self._adopt(recovered)
            _log.info("recovered outer step %d, digest %s", recovered.outer_step, recovered.digest[:12])
        background.spawn(self._watch_the_clock())

    def end_streams(self) -> None:
        """End every peer's streams; they dial again until somebody answers."""
        for attendance in self._attendances.values():
            attendance.over = True
            attendance.changed.set()

    async def close(self) -> None:
        """Stop watching; write a checkpoint of what is committed, let go of the files.

        No checkpoint after a bug: what is in memory may be behind the journal.
        """
        resources = self._resources
        await resources.background.stop()
        if self.outer is not None and self._rounds is not None and resources.background.failure is None:
            await self._rounds.checkpoint()
        resources.store.close()
        resources.intake.close()

    async def _watch_the_clock(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for change in self.membership.tick(self.clock.monotonic()):
                self._member_changed(change)
            self._feed(events.Tick())

    def _adopt(self, outer: OuterState) -> None:
        """The run has parameters: rounds may begin."""
        resources = self._resources
        self.outer = outer
        self._published = Downlink(Head.of(outer), resources.store, resources.background, self.clock.monotonic)
        self._rounds = RoundRunner(outer, self.config, resources, self._published, self, first_round_id=self._first_round_id)
        for standing, order in ((resources.orders.paused, events.Pause()), (resources.orders.draining, events.Drain())):
            if standing:
                self._feed(order)
        self._feed(events.Tick())
        if self._rounds.machine.phase is Phase.FINISHED:
            self.finished.set()

    # ---- attendance ----------------------------------------------------------------------------------------------------

    def attend(self, peer_id: str, schema: Schema, rank: int = 0, ranks: int = 1) -> Attendance:
        """A rank's stream opened. Raises RefusedError; the reason is for the peer's operator."""
        self._check_schema(schema)
        if (older := self._attendances.get((peer_id, rank))) is not None:
            older.expel(RefusedError(REPLACED))
        attendance = Attendance(peer_id=peer_id, rank=rank, number=0, schema=schema)
        changes: Iterable[Change] = ()
        if rank == 0:
            attendance.number, changes = self.membership.attended(peer_id, self.clock.monotonic())
            for stale in self._of(peer_id):
                if stale.rank >= ranks:  # of a larger replica that was here before
                    stale.expel(RefusedError(f"the replica has {ranks} ranks now; rank {stale.rank} is none of them"))
        self._attendances[peer_id, rank] = attendance
        for change in changes:
            self._member_changed(change)
        if rank == 0 and self.outer is None and self._founder is None:
            self._founder = peer_id
        self._notify()
        return attendance

    def _check_schema(self, schema: Schema) -> None:
        if self.outer is not None and (difference := self.outer.schema.first_difference(schema)) is not None:
            raise RefusedError(f"another model: {difference}")
        sync = self.config.sync
        try:
            fragments_due(0, len(schema.fragments), sync.groups, sync.pattern)
        except ConfigError as error:
            raise RefusedError(str(error)) from error

    def leave(self, attendance: Attendance, reason: str, *, polite: bool) -> None:
        """The stream ended, politely or not. reason: `the connection broke`, or what was wrong."""
        peer_id, rank = attendance.peer_id, attendance.rank
        counts = self._attendances.get((peer_id, rank)) is attendance
        if counts:
            del self._attendances[peer_id, rank]
        if rank == 0:
            for change in self.membership.closed(peer_id, attendance.number, reason, self.clock.monotonic(), polite=polite):
                self._member_changed(change)
            if counts and self._founder == peer_id and self.outer is None:
                self._founder = min((other for other, its_rank in self._attendances if its_rank == 0), default=None)
        elif counts and not polite and not attendance.over and attendance.expelled is None:
            self._rank_lost(peer_id, f"rank {rank}: {reason}")
        if counts:
            self._notify()

    def _rank_lost(self, peer_id: str, reason: str) -> None:
        """Without one of its ranks the replica cannot contribute; its lease is rank 0's and goes on."""
        _log.info("%s: lost to the round (%s)", peer_id, reason)
        self._feed(events.MemberLost(peer_id, reason))

    def heartbeat(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """A peer reported. Only rank 0 speaks for the replica; what the others say keeps their connection alive, no more."""
        if attendance.rank != 0:
            return
        peer_id, now = attendance.peer_id, self.clock.monotonic()
        for change in self.membership.heartbeat(peer_id, attendance.number, heartbeat, now):
            self._member_changed(change)
        if now - attendance.last_line >= _PEER_LINE_S:
            attendance.last_line = now
            self.metrics.line("peer", self.clock.unix(), {"peer_id": peer_id, **heartbeat.as_json()})
        self._check_digest(attendance, heartbeat)
        if warning := self._advice.new_warning(peer_id, heartbeat.step_s):
            _log.warning("%s: %s", peer_id, warning)
        if heartbeat.state is not PeerState.STARTING and not attendance.resync:
            self._feed(events.MemberReady(peer_id, heartbeat.outer_step, heartbeat.step_s))

    def _check_digest(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """Rule: the aggregator's theta is the truth; a peer whose digest differs takes a snapshot, and the reason is logged."""
        if self._published is None or heartbeat.outer_step != self._published.outer_step:
            return
        resync = digest_mismatch(heartbeat.digest, heartbeat.outer_step, self._published.digest)
        if resync != attendance.resync:
            attendance.resync = resync
            _log.warning("%s: %s", attendance.peer_id, resync or "resynced")
            attendance.changed.set()

    def progress(self, peer_id: str) -> None:
        """Bytes of this peer arrive: a slow link is not a dead peer."""
        for change in self.membership.progress(peer_id, self.clock.monotonic()):
            self._member_changed(change)

    def _member_changed(self, change: Change) -> None:
        fields = {"peer_id": change.peer_id, "state": change.state.value, "reason": change.reason}
        self.metrics.line("member", self.clock.unix(), fields)
        if not change.live:
            _log.info("%s: %s (%s)", change.peer_id, change.state.value, change.reason)
            self._feed(events.MemberLost(change.peer_id, change.reason))

    def _of(self, peer_id: str) -> list[Attendance]:
        return [attendance for attendance in self._attendances.values() if attendance.peer_id == peer_id]

    # ---- the operator's words --------------------------------------------------------------------------------------------

    def evict(self, peer_id: str, reason: str) -> None:
        """This identity is out for good, with all its ranks. Raises RefusedError for an unknown one."""
        self.members.evict(peer_id, reason)
        for change in self.membership.evict(peer_id, reason, self.clock.monotonic()):
            self._member_changed(change)
        for attendance in self._of(peer_id):
            attendance.expel(EvictedError(reason))

    def pause(self) -> None:
        """No rounds until `resume`, also of a later process. Raises StorageError; then nothing is paused."""
        self._resources.orders.pause()
        self._feed(events.Pause())
        self._notify()

    def resume(self) -> None:
        """Rounds again, also after `drain`. Raises StorageError; then nothing is resumed."""
        self._resources.orders.resume()
        self.finished.clear()
        self._feed(events.Resume())
        self._notify()

    def drain(self) -> None:
        """The open round comes to its end, then the run is finished. Raises RefusedError before the founding, StorageError."""
        if self._rounds is None:
            raise RefusedError("the run has no parameters yet, so there is nothing to drain; stop the coordinator")
        self._resources.orders.drain()
        self._rounds.feed(events.Drain())
        self._notify()

    def _feed(self, event: events.Event) -> None:
        if self._rounds is not None:
            self._rounds.feed(event)

    # ---- what peers see ------------------------------------------------------------------------------------------------

    def view(self, attendance: Attendance | None) -> View:
        """The run as this rank is to see it; None: as an operator does."""
        sequence = self._sequence
        if self._published is None or self._rounds is None:
            founder = attendance is not None and attendance.rank == 0 and attendance.peer_id == self._founder
            return View(sequence=sequence, phase=RunPhase.FOUNDING, found=founder, reason=self._held_up())
        published, machine = self._published, self._rounds.machine
        last_round, committed, reason = self._rounds.last_closed
        return View(
            sequence=sequence,
            phase=_PHASES[machine.phase],
            outer_step=published.outer_step,
            round_id=machine.round_id,
            digest=published.digest,
            oldest_update=published.oldest_update,
            last_round_id=last_round,
            last_committed=committed,
            last_reason=reason,
            resync=attendance.resync if attendance is not None else "",
            reason=self._held_up(),
            inner_steps=self._advice.inner_steps(self.membership.members.get(attendance.peer_id)) if attendance else 0,
            draining=machine.draining,
        )

    def _held_up(self) -> str:
        """Why no round comes, or ''."""
        return self._impossible() or (_PAUSED if self._resources.orders.paused else "")

    def _impossible(self) -> str:
        if self.outer is None:  # peers are still to come
            return ""
        joined = sum(one.role == "peer" and one.evicted is None for one in self.members.all())
        return impossible(self.config.rounds, self.outer.outer_step, joined)

    def _notify(self) -> None:
        self._advice.update(self.membership.members.values())
        if self._advice.newly_impossible(reason := self._impossible()):
            _log.warning("%s", reason)
        self._sequence += 1
        for attendance in self._attendances.values():
            attendance.changed.set()

    # ---- the exchange's observer -----------------------------------------------------------------------------------------

    def round_changed(self) -> None:
        """The view is another one."""
        self._notify()

    def round_committed(self, commit: Commit, missing: Sequence[str]) -> None:
        """Count what each member had in it."""
        weights: dict[str, float] = {}
        for fragment in commit.fragments:
            for verdict in fragment.verdicts:
                weights[verdict.peer_id] = weights.get(verdict.peer_id, 0.0) + verdict.weight
        self.membership.count(
            merged=[peer for peer, weight in weights.items() if weight > 0],
            rejected=[peer for peer, weight in weights.items() if weight == 0],
            absent=missing,
        )

    def run_finished(self) -> None:
        """Everybody may go home."""
        self.finished.set()
        self._notify()

    # ---- founding ------------------------------------------------------------------------------------------------------

    def check_founder(self, peer_id: str, header: FoundHeader) -> Schema:
        """The announced schema. Raises StaleError when the run has parameters, RefusedError when another peer was chosen."""
        self.same_run(header.run_id)
        if self.outer is not None:
            raise StaleError("the run has parameters already; take a snapshot")
        attendance = self._attendances.get((peer_id, 0))
        if self._founder != peer_id or attendance is None:
            raise RefusedError(f"the founder is {self._founder}, not {peer_id}")
        if attendance.schema.schema_hash != header.schema_hash:
            raise RemoteProtocolError("founding with another schema than the one announced")
        return attendance.schema

    async def found(self, peer_id: str, schema: Schema, theta: Sequence[Tensor], claimed_digest: str) -> None:
        """Take the founder's parameters as outer step 0. Raises as `check_founder`, RemoteProtocolError, StorageError."""

        def work() -> OuterState:
            if not all(bool(fragment.isfinite().all()) for fragment in theta):
                raise RemoteProtocolError("the founder's parameters are not finite")
            outer = OuterState(schema, self.config, theta)
            if outer.digest != claimed_digest:
                raise RemoteProtocolError("the founder's parameters do not have the digest it claims")
            self._resources.store.found(outer)
            return outer

        outer = await self._resources.background.in_worker(work)
        if self.outer is not None:
            raise StaleError("the run has parameters already; take a snapshot")
        _log.info("%s founded the run: %d parameters in %d fragments", peer_id, schema.numel, len(schema.fragments))
        self._adopt(outer)
        for attendance in list(self._attendances.values()):
            if (difference := schema.first_difference(attendance.schema)) is not None:
                attendance.expel(RefusedError(f"another model: {difference}"))
        self._notify()

    # ---- what a founded run has --------------------------------------------------------------------------------------------

    @property
    def machine(self) -> RoundMachine | None:
        """None before the founding."""
        return self._rounds.machine if self._rounds is not None else None

    @property
    def rounds(self) -> RoundRunner:
        """Raises StaleError before the founding."""
        if self._rounds is None:
            raise StaleError("the run has no parameters yet")
        return self._rounds

    @property
    def published_step(self) -> int:
        """The outer step that members are told of; 0 before the founding."""
        return 0 if self._published is None else self._published.outer_step

    @property
    def published(self) -> Downlink:
        """Raises StaleError before the founding."""
        if self._published is None:
            raise StaleError("the run has no parameters yet")
        return self._published

    def same_run(self, run_id: str) -> None:
        """Raises RefusedError for another run."""
        if run_id != self.run_id:
            raise RefusedError(f"this is run {self.run_id}, not {run_id}")
