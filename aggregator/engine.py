"""The run in one process: feeds events to the sans-IO machines and carries out what they decide.

Owns: the order of things (journal before memory, memory before publishing), the founding, the views that peers see. Decides
nothing about rounds (`aggregator.rounds`), leases (`aggregator.membership`) or numbers (`edit`). Must not know: gRPC.

Threads: everything here runs on the event loop, except the methods that `_in_worker` names: they touch the outer state and the
disk, and the one worker thread runs them one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from aggregator import round_events as events
from aggregator.authority import Members
from aggregator.intake import Intake, Slot
from aggregator.membership import Change, Membership, digest_mismatch
from aggregator.metrics import MetricsLog, RoundReport
from aggregator.round_events import Phase
from aggregator.rounds import RoundMachine
from aggregator.shelf import Shelf
from aggregator.store import Store
from edit.config import RunConfig
from edit.errors import EvictedError, GoneError, RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.merge import measure
from edit.outer_state import Measured, OuterState, Staged
from edit.records import Commit, EncodedTensor
from edit.schedule import fragments_due
from edit.schema import Schema
from editpb.messages import (
    ContributionHeader,
    FoundHeader,
    Heartbeat,
    PeerState,
    RunPhase,
    SnapshotManifest,
    SnapshotRequest,
    View,
)

__all__ = ["Attendance", "Clock", "Engine", "Resources"]

_log = logging.getLogger(__name__)

_PHASES = {
    Phase.GATHERING: RunPhase.GATHERING,
    Phase.COLLECTING: RunPhase.COLLECTING,
    Phase.COMMITTING: RunPhase.COMMITTING,
    Phase.PAUSED: RunPhase.PAUSED,
    Phase.FINISHED: RunPhase.FINISHED,
}
_T = TypeVar("_T")
_TICK_S = 0.25  # how often leases and deadlines are looked at
_PEER_LINE_S = 1.0  # at most one metrics line per peer in this time


@dataclass(frozen=True, slots=True)
class Clock:
    """Injected time. monotonic: seconds for leases and deadlines; unix: seconds since 1970 for people."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(slots=True)
class Attendance:
    """One peer's open stream. `changed` is set when the view changed; `expelled` holds the last message, if it must go."""

    peer_id: str
    number: int
    schema: Schema
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expelled: EvictedError | RefusedError | None = None
    over: bool = False  # the coordinator stops; the peer dials again
    heal: str = ""
    last_line: float = -math.inf


@dataclass(slots=True)
class _Round:
    """What belongs to the open round. A new round gets a new object, so late results of an old one land nowhere."""

    round_id: int
    opened: events.RoundOpened
    payloads: dict[tuple[str, int], Measured] = field(default_factory=dict)
    staged: dict[int, Staged] = field(default_factory=dict)
    bytes_in: int = 0
    commit: Commit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the engine works with. worker: ONE thread, for torch and the disk."""

    store: Store
    intake: Intake
    members: Members
    worker: Executor
    metrics: MetricsLog
    clock: Clock = field(default_factory=Clock)


class Engine:
    """See the module's text. Call `start` once on the event loop, `close` at the end."""

    def __init__(self, run_id: str, config: RunConfig, resources: Resources, *, first_round_id: int) -> None:
        self.run_id, self.config, self.metrics, self.members = run_id, config, resources.metrics, resources.members
        self.clock = resources.clock
        self.membership = Membership(config.membership)
        self.outer: OuterState | None = None
        self.machine: RoundMachine | None = None
        self.finished = asyncio.Event()
        self._store, self._intake, self._worker = resources.store, resources.intake, resources.worker
        self._first_round_id = first_round_id
        self._attendances: dict[str, Attendance] = {}
        self._founder: str | None = None
        self._sequence = 0
        self._round: _Round | None = None
        self.shelf = Shelf()
        self._last_closed: tuple[int, bool, str] = (0, False, "")
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the outer state, if there is any, and begin to watch the clock. Raises StorageError."""
        recovered = await self._in_worker(self._store.recover, self.config)
        if recovered is not None:
            self._adopt(recovered)
            _log.info("recovered outer step %d, digest %s", recovered.outer_step, recovered.digest[:12])
        self._spawn(self._watch_the_clock())

    def hang_up(self) -> None:
        """End every peer's stream; they dial again until somebody answers."""
        for attendance in self._attendances.values():
            attendance.over = True
            attendance.changed.set()

    async def close(self) -> None:
        """Stop watching; write a checkpoint of what is committed, let go of the files."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.outer is not None:
            await self._in_worker(self._store.checkpoint, self.outer)
        self._store.close()
        self._intake.close()

    async def _watch_the_clock(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for change in self.membership.tick(self.clock.monotonic()):
                self._member_changed(change)
            self._feed(events.Tick())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a background task failed", exc_info=error)

    async def _in_worker(self, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call, *arguments)

    def _adopt(self, outer: OuterState) -> None:
        self.outer = outer
        self.machine = RoundMachine(
            self.config.rounds,
            due=lambda step: fragments_due(
                step, len(outer.schema.fragments), self.config.sync.groups, self.config.sync.pattern
            ),
            outer_step=outer.outer_step,
            outer_steps=self.config.sync.outer_steps,
            first_round_id=self._first_round_id,
        )
        self._feed(events.Tick())
        if self.machine.phase is Phase.FINISHED:
            self.finished.set()

    # ---- attendance ----------------------------------------------------------------------------------------------------

    def attend(self, peer_id: str, schema: Schema) -> Attendance:
        """A peer's stream opened. Raises RefusedError; the reason is for the peer's operator."""
        if self.outer is not None and (difference := self.outer.schema.first_difference(schema)) is not None:
            raise RefusedError(f"another model: {difference}")
        if (older := self._attendances.get(peer_id)) is not None:
            self._expel(older, RefusedError("replaced by a newer connection of the same identity"))
        number, changes = self.membership.attended(peer_id, self.clock.monotonic())
        attendance = Attendance(peer_id=peer_id, number=number, schema=schema)
        self._attendances[peer_id] = attendance
        for change in changes:
            self._member_changed(change)
        if self.outer is None and self._founder is None:
            self._founder = peer_id
        self._notify()
        return attendance

    def leave(self, attendance: Attendance, reason: str, *, polite: bool) -> None:
        """The stream ended, politely or not."""
        peer_id = attendance.peer_id
        for change in self.membership.closed(peer_id, attendance.number, reason, self.clock.monotonic(), polite=polite):
            self._member_changed(change)
        if self._attendances.get(peer_id) is attendance:
            del self._attendances[peer_id]
            if self._founder == peer_id and self.outer is None:
                self._founder = min(self._attendances, default=None)
            self._notify()

    def heartbeat(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """A peer reported."""
        peer_id, now = attendance.peer_id, self.clock.monotonic()
        for change in self.membership.heartbeat(peer_id, attendance.number, heartbeat, now):
            self._member_changed(change)
        if now - attendance.last_line >= _PEER_LINE_S:
            attendance.last_line = now
            self.metrics.line("peer", self.clock.unix(), {"peer_id": peer_id, **heartbeat.as_json()})
        self._check_digest(attendance, heartbeat)
        if heartbeat.state is not PeerState.STARTING and not attendance.heal:
            self._feed(events.MemberReady(peer_id, heartbeat.outer_step))

    def _check_digest(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """Rule: the aggregator's theta is the truth; a peer whose digest differs takes a snapshot, and the reason is logged."""
        outer = self.outer
        if outer is None or heartbeat.outer_step != outer.outer_step:
            return
        heal = digest_mismatch(heartbeat.digest, heartbeat.outer_step, outer.digest)
        if heal != attendance.heal:
            attendance.heal = heal
            _log.warning("%s: %s", attendance.peer_id, heal or "healed")
            attendance.changed.set()

    def _member_changed(self, change: Change) -> None:
        fields = {"peer_id": change.peer_id, "state": change.state.value, "reason": change.reason}
        self.metrics.line("member", self.clock.unix(), fields)
        if not change.live:
            _log.info("%s: %s (%s)", change.peer_id, change.state.value, change.reason)
            self._feed(events.MemberLost(change.peer_id, change.reason))

    def _expel(self, attendance: Attendance, error: EvictedError | RefusedError) -> None:
        attendance.expelled = error
        attendance.changed.set()

    def evict(self, peer_id: str, reason: str) -> None:
        """The operator's word: this identity is out for good. Raises RefusedError for an unknown one."""
        self.members.evict(peer_id, reason)
        for change in self.membership.evict(peer_id, reason, self.clock.monotonic()):
            self._member_changed(change)
        if (attendance := self._attendances.get(peer_id)) is not None:
            self._expel(attendance, EvictedError(reason))

    def pause(self) -> None:
        self._feed(events.Pause())

    def resume(self) -> None:
        self._feed(events.Resume())

    # ---- what peers see ------------------------------------------------------------------------------------------------

    def view(self, attendance: Attendance | None) -> View:
        """The run as this peer is to see it; None: as an operator does."""
        machine, outer = self.machine, self.outer
        last_round, committed, reason = self._last_closed
        return View(
            sequence=self._sequence,
            phase=_PHASES[machine.phase] if machine is not None else RunPhase.FOUNDING,
            outer_step=outer.outer_step if outer is not None else 0,
            round_id=machine.round_id if machine is not None else 0,
            digest=outer.digest if outer is not None else "",
            oldest_update=self._store.oldest_update,
            last_round_id=last_round,
            last_committed=committed,
            last_reason=reason,
            heal=attendance.heal if attendance is not None else "",
            found=outer is None and attendance is not None and self._founder == attendance.peer_id,
        )

    def _notify(self) -> None:
        self._sequence += 1
        for attendance in self._attendances.values():
            attendance.changed.set()

    # ---- founding ------------------------------------------------------------------------------------------------------

    def check_founder(self, peer_id: str, header: FoundHeader) -> Schema:
        """The announced schema. Raises StaleError when the run has parameters, RefusedError when another peer was chosen."""
        self.same_run(header.run_id)
        if self.outer is not None:
            raise StaleError("the run has parameters already; take a snapshot")
        attendance = self._attendances.get(peer_id)
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
            self._store.found(outer)
            return outer

        outer = await self._in_worker(work)
        if self.outer is not None:
            raise StaleError("the run has parameters already; take a snapshot")
        _log.info("%s founded the run: %d parameters in %d fragments", peer_id, schema.numel, len(schema.fragments))
        self._adopt(outer)
        for attendance in list(self._attendances.values()):
            if (difference := schema.first_difference(attendance.schema)) is not None:
                self._expel(attendance, RefusedError(f"another model: {difference}"))
        self._notify()

    # ---- what peers fetch ----------------------------------------------------------------------------------------------

    def update(self, run_id: str, outer_step: int) -> Commit:
        """The published update TO `outer_step`. Raises GoneError when it is not kept (any more)."""
        self.same_run(run_id)
        commit = self._store.update(outer_step)
        if commit is None:
            raise GoneError(f"the update to outer step {outer_step} is not kept; take a snapshot")
        return commit

    @property
    def schema(self) -> Schema:
        """The run's. Raises StaleError before the founding."""
        if self.outer is None:
            raise StaleError("the run has no parameters yet")
        return self.outer.schema

    def describe_snapshot(self, run_id: str) -> SnapshotManifest:
        """theta of now; it is kept for a while, so that it can be read in several calls. Raises StaleError."""
        self.same_run(run_id)
        if self.outer is None:
            raise StaleError("the run has no parameters yet")
        outer, now = self.outer, self.clock.monotonic()
        return self.shelf.known(outer.outer_step, now) or self.shelf.put(
            SnapshotManifest(
                outer_step=outer.outer_step, digest=outer.digest, schema=outer.schema, fragment_hash=outer.fragment_hashes
            ),
            tuple(outer.theta),
            now,
        )

    def snapshot_fragment(self, wanted: SnapshotRequest) -> Tensor:
        """One fragment of a snapshot that was described. Raises GoneError."""
        self.same_run(wanted.run_id)
        return self.shelf.take(wanted.outer_step, wanted.fragment_id, self.clock.monotonic())

    def same_run(self, run_id: str) -> None:
        if run_id != self.run_id:
            raise RefusedError(f"this is run {self.run_id}, not {run_id}")

    # ---- contributions -------------------------------------------------------------------------------------------------

    def offer(self, header: ContributionHeader) -> Slot:
        """A contribution's header arrived: the slot for its bytes. Raises StaleError, RefusedError, RemoteProtocolError."""
        if self.outer is None or self.machine is None:
            raise StaleError("the run has no parameters yet")
        self.same_run(header.run_id)
        if header.schema_hash != self.outer.schema.schema_hash:
            raise RefusedError("another model: the contribution's schema_hash is not the run's")
        self._feed(events.Offered(header.peer_id, header.round_id, header.outer_step, header.fragment_id), refuse=True)
        return self._intake.open(header.peer_id, header.round_id, header.fragment_id, header.total_bytes)

    def progress(self, peer_id: str) -> None:
        """Bytes of this peer arrive: a slow link is not a dead peer."""
        for change in self.membership.progress(peer_id, self.clock.monotonic()):
            self._member_changed(change)

    async def arrived(self, header: ContributionHeader, slot: Slot) -> None:
        """All bytes are in and intact: measure, and tell the round machine."""
        current = self._round
        if current is None or current.round_id != header.round_id:
            raise StaleError(f"round {header.round_id} is closed")
        key = (header.peer_id, header.fragment_id)
        if key in current.payloads:
            return

        def read() -> EncodedTensor:
            return EncodedTensor(header.codec, header.numel, slot.payload())

        norm = await self._in_worker(lambda: measure(read()))
        if key in current.payloads or self._round is not current:
            return
        current.payloads[key] = Measured(header.peer_id, header.inner_steps, header.tokens, norm, read)
        current.bytes_in += header.total_bytes
        self._feed(events.Arrived(header.peer_id, header.round_id, header.fragment_id))

    def fault(self, peer_id: str, round_id: int, reason: str) -> None:
        """This peer's bytes broke the protocol: it is out of the round, and nothing else happens."""
        _log.warning("%s: %s", peer_id, reason)
        self._feed(events.Faulted(peer_id, round_id, reason))

    # ---- rounds --------------------------------------------------------------------------------------------------------

    def _feed(self, event: events.Event, *, refuse: bool = False) -> None:
        """Hand an event to the round machine and carry out the effects. refuse: turn a refusal into StaleError."""
        if self.machine is None:
            return
        before = (self.machine.phase, self.machine.round_id)
        refusal: events.Refused | None = None
        for effect in self.machine.handle(event, self.clock.monotonic()):
            if isinstance(effect, events.Refused):
                refusal = effect
            else:
                self._carry_out(effect)
        if (self.machine.phase, self.machine.round_id) != before:
            self._notify()
        if refusal is not None and refuse:
            raise StaleError(refusal.reason) if refusal.stale else RemoteProtocolError(refusal.reason)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.RoundOpened():
                self._round = _Round(round_id=effect.round_id, opened=effect)
            case events.Reduce():
                self._spawn(self._reduce(effect))
            case events.Commit():
                self._spawn(self._commit(effect))
            case events.RoundClosed():
                self._close_round(effect)
            case events.RunFinished():
                _log.info("finished at outer step %d", effect.outer_step)
                self._spawn(self._finish())

    async def _reduce(self, effect: events.Reduce) -> None:
        current, outer = self._round, self.outer
        if current is None or outer is None or current.round_id != effect.round_id:
            return
        contributions = [current.payloads[(peer_id, effect.fragment_id)] for peer_id in effect.peers]

        def work() -> Staged:
            merged = outer.reduce(effect.fragment_id, contributions)
            staged = outer.stage(merged)
            self._store.append_fragment(effect.round_id, outer.outer_step + 1, merged)
            return replace(staged, merged=replace(merged, merged=None))  # D is on disk and in the step: free its memory

        try:
            current.staged[effect.fragment_id] = await self._in_worker(work)
        except StorageError as error:
            self._feed(events.RoundFailed(effect.round_id, str(error)))
        else:
            self._feed(events.Reduced(effect.round_id, effect.fragment_id))

    async def _commit(self, effect: events.Commit) -> None:
        current, outer = self._round, self.outer
        if current is None or outer is None or current.round_id != effect.round_id:
            return
        staged = [current.staged[i] for i in sorted(current.staged)]

        def work() -> Commit:
            self._store.append_commit(effect.round_id, outer.outer_step + 1, effect.reason)
            commit = outer.commit(effect.round_id, effect.reason, staged)
            self._store.publish(commit)
            return commit

        try:
            current.commit = await self._in_worker(work)
        except StorageError as error:
            self._feed(events.RoundFailed(effect.round_id, str(error)))
            return
        self._count(current.commit, effect.missing)
        self._feed(events.CommitSucceeded(effect.round_id))
        if outer.outer_step % self.config.storage.checkpoint_every == 0:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """A checkpoint that cannot be written loses nothing: the journal before it stays."""
        try:
            await self._in_worker(self._store.checkpoint, self.outer)
        except StorageError as error:
            _log.error("no checkpoint: %s", error)

    async def _finish(self) -> None:
        await self._checkpoint()
        self.finished.set()
        self._notify()

    def _count(self, commit: Commit, missing: Sequence[str]) -> None:
        weights: dict[str, float] = {}
        for fragment in commit.fragments:
            for verdict in fragment.verdicts:
                weights[verdict.peer_id] = weights.get(verdict.peer_id, 0.0) + verdict.weight
        self.membership.count(
            merged=[peer for peer, weight in weights.items() if weight > 0],
            rejected=[peer for peer, weight in weights.items() if weight == 0],
            absent=missing,
        )

    def _close_round(self, effect: events.RoundClosed) -> None:
        current, self._round = self._round, None
        self._intake.drop_round(effect.round_id)
        self._last_closed = (effect.round_id, effect.committed, effect.reason)
        commit = current.commit if current is not None else None
        report = RoundReport(
            round_id=effect.round_id,
            outer_step=effect.outer_step,
            committed=effect.committed,
            reason=effect.reason,
            seconds=effect.seconds,
            bytes_in=current.bytes_in if current is not None else 0,
            bytes_out=sum(len(f.payload.data) for f in commit.fragments if f.payload is not None) if commit else 0,
            missing=tuple(effect.missing),
            digest=commit.digest if commit else "",
            fragments=tuple(replace(fragment, payload=None) for fragment in commit.fragments) if commit else (),
        )
        self.metrics.round_closed(report, self.clock.unix())
        state = "committed" if effect.committed else "aborted"
        _log.info("round %d %s: %s (%.2f s)", effect.round_id, state, effect.reason, effect.seconds)
