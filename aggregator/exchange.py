"""The rounds of a founded run: feeds the round machine and carries out what it decides.

Owns: the contributions of the open round, and the order of things (journal before memory, memory before publishing). Decides
nothing about rounds (`aggregator.rounds`), attempts and ranks (`aggregator.parts`) or numbers (`edit`). Must not know: gRPC,
attendance, the founding.

Threads: everything here runs on the event loop, except the functions named `work`: they touch the outer state and the disk, and
the one worker thread runs them one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from aggregator import round_events as events
from aggregator.downlink import Downlink, Head
from aggregator.intake import Slot
from aggregator.metrics import RoundReport
from aggregator.parts import Parts
from aggregator.resources import Resources
from aggregator.rounds import RoundMachine
from edit.config import RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.merge import measure
from edit.outer_state import OuterState, Staged
from edit.records import Commit
from edit.schedule import fragments_due
from editpb.messages import ContributionHeader

__all__ = ["Exchange", "Observer"]

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who is told what became of the rounds."""

    def round_changed(self) -> None:
        """The phase or the open round is another one."""
        ...

    def round_committed(self, commit: Commit, missing: Sequence[str]) -> None:
        """A commit is on disk; missing: who was expected and is not part of it."""
        ...

    def run_finished(self) -> None:
        """The last outer step is committed and checkpointed."""
        ...


@dataclass(slots=True)
class _Round:
    """What belongs to the open round. A new round gets a new object, so late results of an old one land nowhere."""

    round_id: int
    parts: dict[tuple[str, int], Parts] = field(default_factory=dict)
    staged: dict[int, Staged] = field(default_factory=dict)
    bytes_in: int = 0
    commit: Commit | None = None


class Exchange:
    """One founded run's rounds. first_round_id: larger than any id of an earlier process."""

    def __init__(
        self,
        outer: OuterState,
        config: RunConfig,
        resources: Resources,
        downlink: Downlink,
        observer: Observer,
        *,
        first_round_id: int,
    ) -> None:
        self._outer, self._downlink, self._observer = outer, downlink, observer
        self._store, self._intake, self._background = resources.store, resources.intake, resources.background
        self._metrics, self._clock = resources.metrics, resources.clock
        self._checkpoint_every = config.storage.checkpoint_every
        self._round: _Round | None = None
        self.last_closed: tuple[int, bool, str] = (0, False, "")  # round_id, committed, reason
        self.machine = RoundMachine(
            config.rounds,
            due=lambda step: fragments_due(step, len(outer.schema.fragments), config.sync.groups, config.sync.pattern),
            outer_step=outer.outer_step,
            outer_steps=config.sync.outer_steps,
            first_round_id=first_round_id,
        )

    # ---- contributions -------------------------------------------------------------------------------------------------

    def offer(self, header: ContributionHeader) -> Slot | None:
        """The header of a part arrived: the slot for its bytes; None: none are needed (see `Parts.declare`).

        Raises StaleError, RefusedError, RemoteProtocolError.
        """
        schema = self._outer.schema
        if header.schema_hash != schema.schema_hash:
            raise RefusedError("another model: the contribution's schema_hash is not the run's")
        self._offered(events.Offered(header.peer_id, header.round_id, header.outer_step, header.fragment_id))
        current = self._open_round(header.round_id)
        key = (header.peer_id, header.fragment_id)
        if key not in current.parts:
            current.parts[key] = Parts(schema.fragments[header.fragment_id], self._intake)
        return current.parts[key].declare(header)

    async def arrived(self, header: ContributionHeader, slot: Slot) -> None:
        """All bytes of a part are in and intact: measure it; with the last part, tell the round machine."""
        current = self._open_round(header.round_id)
        parts = current.parts[(header.peer_id, header.fragment_id)]
        read = parts.reader(slot)
        if read is None:
            return

        def work() -> float:
            return measure(read())

        norm = await self._background.in_worker(work)
        if self._round is not current or parts.reader(slot) is None:
            return
        current.bytes_in += header.total_bytes
        if parts.measured(slot, norm):
            self.feed(events.Arrived(header.peer_id, header.round_id, header.fragment_id))

    def fault(self, peer_id: str, round_id: int, reason: str) -> None:
        """This peer's bytes broke the protocol: it is out of the round, and nothing else happens."""
        _log.warning("%s: %s", peer_id, reason)
        self.feed(events.Faulted(peer_id, round_id, reason))

    def _open_round(self, round_id: int) -> _Round:
        if self._round is None or self._round.round_id != round_id:
            raise StaleError(f"round {round_id} is closed")
        return self._round

    # ---- rounds --------------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> events.Refused | None:
        """Hand an event to the round machine and carry out the effects; returns the refusal, if there is one."""
        before = (self.machine.phase, self.machine.round_id)
        refusal: events.Refused | None = None
        for effect in self.machine.handle(event, self._clock.monotonic()):
            if isinstance(effect, events.Refused):
                refusal = effect
            else:
                self._carry_out(effect)
        if (self.machine.phase, self.machine.round_id) != before:
            self._observer.round_changed()
        return refusal

    def _offered(self, event: events.Offered) -> None:
        if (refusal := self.feed(event)) is not None:
            raise StaleError(refusal.reason) if refusal.stale else RemoteProtocolError(refusal.reason)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.RoundOpened():
                self._round = _Round(effect.round_id)
            case events.Reduce():
                self._background.spawn(self._reduce(effect))
            case events.Commit():
                self._background.spawn(self._commit(effect))
            case events.RoundClosed():
                self._close_round(effect)
            case events.RunFinished():
                _log.info("finished at outer step %d", effect.outer_step)
                self._background.spawn(self._finish())

    async def _reduce(self, effect: events.Reduce) -> None:
        current, outer = self._round, self._outer
        if current is None or current.round_id != effect.round_id:
            return
        contributions = [current.parts[(peer_id, effect.fragment_id)].contribution() for peer_id in effect.peers]

        def work() -> Staged:
            merged = outer.reduce(effect.fragment_id, contributions)
            staged = outer.stage(merged)
            self._store.append_fragment(effect.round_id, outer.outer_step + 1, merged)
            return replace(staged, merged=replace(merged, merged=None))  # D is on disk and in the step: free its memory

        try:
            current.staged[effect.fragment_id] = await self._background.in_worker(work)
        except StorageError as error:
            self.feed(events.RoundFailed(effect.round_id, str(error)))
        else:
            self.feed(events.Reduced(effect.round_id, effect.fragment_id))

    async def _commit(self, effect: events.Commit) -> None:
        current, outer = self._round, self._outer
        if current is None or current.round_id != effect.round_id:
            return
        staged = [current.staged[i] for i in sorted(current.staged)]

        def work() -> tuple[Commit, Head]:
            self._store.append_commit(effect.round_id, outer.outer_step + 1, effect.reason)
            commit = outer.commit(effect.round_id, effect.reason, staged)
            self._store.publish(commit)
            return commit, Head.of(outer)

        try:
            commit, head = await self._background.in_worker(work)
        except StorageError as error:
            self.feed(events.RoundFailed(effect.round_id, str(error)))
            return
        current.commit = commit
        self._downlink.show(head)
        self._observer.round_committed(commit, effect.missing)
        self.feed(events.CommitSucceeded(effect.round_id))
        if commit.outer_step % self._checkpoint_every == 0:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """A checkpoint that cannot be written loses nothing: the journal before it stays."""
        try:
            await self._background.in_worker(self._store.checkpoint, self._outer)
        except StorageError as error:
            _log.error("no checkpoint: %s", error)

    async def _finish(self) -> None:
        await self._checkpoint()
        self._observer.run_finished()

    def _close_round(self, effect: events.RoundClosed) -> None:
        current, self._round = self._round, None
        self._intake.drop_round(effect.round_id)
        self.last_closed = (effect.round_id, effect.committed, effect.reason)
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
        self._metrics.round_closed(report, self._clock.unix())
        state = "committed" if effect.committed else "aborted"
        _log.info("round %d %s: %s (%.2f s)", effect.round_id, state, effect.reason, effect.seconds)
