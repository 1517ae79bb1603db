"""The rounds of a founded run: feeds the round machine and carries out what it decides.

Owns: the open round, and the order of things (journal before memory, memory before publishing). Decides nothing about rounds
and how long a contribution is held (`edit.rounds.machine`), attempts and ranks (`aggregator.data.sharded_fragment`) or
numbers (`edit`). Must not know: gRPC, attendance, the founding.

Threads: everything here runs on the event loop, except the functions named `work`: they touch the outer state and the disk, and
the one worker thread runs them one after the other. Only the journal is written on a thread of its own
(`aggregator.storage.store`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from aggregator.data.contributions import Contributions
from aggregator.data.published import Downlink, Head
from aggregator.resources import Resources
from aggregator.run_feed import ContributionRefused, PeerFaulted, RoundChanged, RoundReport, RunEnded, StepCommitted
from aggregator.storage.pending_injection import check_bytes
from aggregator.storage.upload_buffer import Upload
from edit.config.run import RunConfig
from edit.durable_files import write_atomic
from edit.errors import RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.groups import fragments_due
from edit.merging.injection import Injected, Injection, check_order, check_run
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState, Staged
from edit.records import Commit
from edit.rounds import events
from edit.rounds.machine import RoundMachine
from editpb.messages import ContributionHeader

__all__ = ["RoundRunner"]

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.25  # at most one word about a transfer in this time


@dataclass(slots=True)
class _Round:
    """What belongs to the open round. A new round gets a new object, so late results of an old one land nowhere.

    tokens: behind the contributions that were merged with a weight, by fragment; bytes_in: that came while it was open.
    injection: what its commit brings of a run above; fixed when its first fragment is reduced.
    """

    round_id: int
    staged: dict[int, Staged] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    bytes_in: int = 0
    commit: Commit | None = None
    injection: Injection | None = None
    fixed: bool = False

    def fix(self, injection: Injection | None) -> Injection | None:
        """What all its fragments bring: what the first one to be reduced was given."""
        if not self.fixed:
            self.injection, self.fixed = injection, True
        return self.injection


class RoundRunner:
    """One founded run's rounds. first_round_id: larger than any id of an earlier process."""

    def __init__(
        self,
        outer: OuterState,
        config: RunConfig,
        resources: Resources,
        published: Downlink,
        *,
        first_round_id: int,
    ) -> None:
        self.outer, self.published = outer, published
        self._store, self._background = resources.store, resources.background
        self._run_feed, self._clock = resources.feed, resources.clock
        self._deadlines_file = resources.deadlines
        self._contributions = Contributions(outer.schema, resources.intake)
        self._told: dict[str, float] = {}  # peer_id -> when the machine last heard of its transfer
        self._due = partial(
            fragments_due, fragments=len(outer.schema.fragments), groups=config.sync.groups, pattern=config.sync.pattern
        )
        self._checkpoint_every = config.storage.checkpoint_every
        self._round: _Round | None = None
        self.last_closed: tuple[int, bool, str] = (0, False, "")  # round_id, committed, reason
        self.machine = RoundMachine(
            config.rounds,
            due=self._due,
            outer_step=outer.outer_step,
            outer_steps=config.sync.outer_steps,
            first_round_id=first_round_id,
            stop_tokens=config.sync.tokens,
            tokens=self._store.tokens,
            overlap=config.sync.overlap,
        )
        self._load_deadlines()

    # ---- contributions -------------------------------------------------------------------------------------------------

    def offer(self, header: ContributionHeader) -> Upload | None:
        """The header of a part arrived: the upload for its bytes; None: none are needed (see `ShardedFragment.declare`).

        Raises StaleError, RefusedError, RemoteProtocolError.
        """
        schema = self.outer.schema
        if header.schema_hash != schema.schema_hash:
            raise RefusedError("another model: the contribution's schema_hash is not the run's")
        self._offered(events.Offered(header.peer_id, header.round_id, header.outer_step, header.fragment_id))
        return self._contributions.declare(header, self._due(header.outer_step))

    async def arrived(self, header: ContributionHeader, upload: Upload) -> None:
        """All bytes of a part are in and intact: measure it; with the last part, tell the round machine."""
        contribution = self._contributions.of(header)
        parts = contribution.parts(header.fragment_id)
        read = parts.reader(upload)
        if read is None:
            return

        def work() -> float:
            return measure(read())

        try:
            norm = await self._background.in_worker(work)
        except StorageError:
            self._contributions.of(header)  # it may have been dropped meanwhile, and then is stale
            raise
        if self._contributions.get(header.peer_id) is not contribution or parts.reader(upload) is None:
            return
        if self._round is not None:
            self._round.bytes_in += header.total_bytes
        if parts.measured(upload, norm):
            self.feed(events.Arrived(header.peer_id, header.round_id, header.fragment_id))

    def progress(self, header: ContributionHeader) -> None:
        """Bytes of this contribution came in."""
        now = self._clock.monotonic()
        contribution = self._contributions.get(header.peer_id)
        if contribution is None or now - self._told.get(header.peer_id, -math.inf) < _PROGRESS_S:
            return
        self._told[header.peer_id] = now
        received, total = contribution.received_bytes, contribution.total_bytes
        self.feed(events.Progress(header.peer_id, header.round_id, received, max(received, total)))

    def upload(self, peer_id: str) -> tuple[int, int]:
        """(bytes so far, bytes in all) of the contribution that is held of this peer; (0, 0): none is."""
        contribution = self._contributions.get(peer_id)
        return (contribution.received_bytes, contribution.total_bytes) if contribution is not None else (0, 0)

    def fault(self, peer_id: str, round_id: int, reason: str) -> None:
        """This peer's bytes broke the protocol: it is out of the round, and nothing else happens."""
        self._run_feed.publish(PeerFaulted(peer_id, round_id, reason))
        self.feed(events.Faulted(peer_id, round_id, reason))

    # ---- what a run above brings ---------------------------------------------------------------------------------------

    @property
    def accepted(self) -> Injected | None:
        """What is on disk of it and comes in with the next commit."""
        pending = self._store.injections.pending
        return pending.brings if pending is not None else None

    def may_bring(self, brings: Injected, base: Injected | None, replaces: bool) -> None:
        """Whether this run takes it as it stands. Raises as `edit.merging.injection` says."""
        check_run(self.outer.config)
        check_order(brings, base, replaces, self.published.injected, self.published.outer_step)

    async def inject(self, injection: Injection, claimed_digest: str) -> None:
        """It is on disk when this returns, and comes in with the next commit. Raises as `may_bring`, StorageError."""

        def work() -> None:
            check_bytes(injection, self.outer.schema, claimed_digest)
            self._store.injections.save(injection)

        await self._background.in_worker(work)
        self.may_bring(injection.brings, injection.base, injection.replaces)  # a commit may have come meanwhile
        self._store.injections.promise(injection)
        _log.info("outer step %d of run %s comes in with the next commit", injection.brings.upper_step, injection.brings.run_id)

    # ---- rounds --------------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> events.Refused | None:
        """Hand an event to the round machine and carry out the effects; returns the refusal, if there is one."""
        try:
            return self._feed(event)
        except Exception as error:  # effects may be lost, and the run would wait for their results for ever
            self._background.fail(error)
            raise

    def _feed(self, event: events.Event) -> events.Refused | None:
        before = (self.machine.phase, self.machine.round_id)
        refusal: events.Refused | None = None
        for effect in self.machine.handle(event, self._clock.monotonic()):
            if isinstance(effect, events.Refused) and isinstance(event, events.Offered | events.Arrived):
                refusal = effect
            elif isinstance(effect, events.Refused):
                self._run_feed.publish(ContributionRefused(effect.peer_id, effect.reason))
                self._contributions.drop(effect.peer_id, effect.reason)
            else:
                self._carry_out(effect)
        if (self.machine.phase, self.machine.round_id) != before:
            self._run_feed.publish(RoundChanged(self.machine.phase.value, self.machine.round_id))
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
                self._contributions.keep((), "the run is finished")
                self._background.spawn(self._finish(effect))

    async def _reduce(self, effect: events.Reduce) -> None:
        """Merge one fragment and write it to the journal; any exception fails the round."""
        current = self._round
        if current is None or current.round_id != effect.round_id:
            return
        try:
            held = ((peer_id, self._contributions.get(peer_id)) for peer_id in effect.peers)
            step = self.machine.outer_step
            contributions = [one.whole(effect.fragment_id, step) for _, one in held if one is not None]
            injection = current.fix(self._store.injections.pending)
            staged, written = await self._background.in_worker(self._merge, effect, contributions, injection)
            await asyncio.wrap_future(written)
        except Exception as error:
            self._fail_round(effect.round_id, error)
            return
        tokens = {one.peer_id: one.tokens for one in contributions}
        current.staged[effect.fragment_id] = staged
        current.tokens[effect.fragment_id] = sum(tokens[v.peer_id] for v in staged.merged.verdicts if v.weight > 0)
        self.feed(events.Reduced(effect.round_id, effect.fragment_id))

    def _merge(
        self, effect: events.Reduce, contributions: Sequence[Measured], injection: Injection | None
    ) -> tuple[Staged, Future[None]]:
        """In the worker thread: reduce, begin to write, stage. Changes nothing but the journal."""
        outer = self.outer
        merged = outer.reduce(effect.fragment_id, contributions)
        written = self._store.begin_fragment(effect.round_id, outer.outer_step + 1, merged, injection)
        staged = outer.stage(merged, injection)
        return replace(staged, merged=replace(merged, merged=None)), written  # it is in the step, and soon on disk: free it

    async def _commit(self, effect: events.Commit) -> None:
        """Make the commit durable, then apply it. An exception before it is on disk fails the round; one after that ends the
        process, since peers must not hear that a commit failed which a restart replays."""
        current, outer = self._round, self.outer
        if current is None or current.round_id != effect.round_id:
            return
        next_step = outer.outer_step + 1
        try:
            staged = [current.staged[i] for i in sorted(current.staged)]
            tokens = self._tokens(current)
            brings = current.injection.brings if current.injection is not None else None
            await self._background.in_worker(
                self._store.append_commit, effect.round_id, next_step, effect.reason, tokens, brings
            )
        except Exception as error:
            self._fail_round(effect.round_id, error)
            return

        def apply() -> tuple[Commit, Head]:
            commit = outer.commit(effect.round_id, effect.reason, staged)
            self._store.publish(commit)
            return commit, Head.of(outer)

        commit, head = await self._background.in_worker(apply)
        current.commit = commit
        self.published.show(head)
        self._store.injections.committed(head.injected)
        self._run_feed.publish(StepCommitted(commit, tuple(effect.missing)))
        self.feed(events.CommitSucceeded(effect.round_id, tokens))
        if next_step % self._checkpoint_every == 0:
            await self.checkpoint()

    def _fail_round(self, round_id: int, error: Exception) -> None:
        """A merge or a commit raised: the round is over and nothing of it is applied."""
        if isinstance(error, StorageError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            _log.error("round %d failed: %s", round_id, reason, exc_info=error)
        self.feed(events.RoundFailed(round_id, reason))

    def _tokens(self, current: _Round) -> int:
        """Behind a commit: with groups each fragment counts for its share of the model, and the others for nothing."""
        schema = self.outer.schema
        return sum(tokens * schema.fragments[i].numel for i, tokens in current.tokens.items()) // schema.numel

    async def checkpoint(self) -> None:
        """Write the state and the measured times. One that cannot be written loses nothing: the journal before it stays."""
        measured = self.machine.deadlines.to_json().encode()
        try:
            await self._background.in_worker(self._store.checkpoint, self.outer)
            if self._deadlines_file is not None:
                await self._background.in_worker(write_atomic, self._deadlines_file, measured)
        except StorageError as error:
            _log.error("no checkpoint: %s", error)
        except Exception as error:  # a bug, which costs no more than a full disk
            _log.error("no checkpoint: %s: %s", type(error).__name__, error, exc_info=error)

    def _load_deadlines(self) -> None:
        """Without the measured times of an earlier start the ceiling counts until there are new ones."""
        if self._deadlines_file is None or not self._deadlines_file.exists():
            return
        try:
            self.machine.deadlines.load(self._deadlines_file.read_text())
        except (OSError, ValueError) as error:
            _log.warning("%s: is passed over (%s); the peers' times are measured anew", self._deadlines_file, error)

    async def _finish(self, effect: events.RunFinished) -> None:
        await self.checkpoint()
        self._run_feed.publish(RunEnded(effect.outer_step, self.machine.tokens))

    def _close_round(self, effect: events.RoundClosed) -> None:
        current, self._round = self._round, None
        self._contributions.keep(effect.carried, "its round is over")
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
            carried=effect.carried,
        )
        self._run_feed.publish(report)
