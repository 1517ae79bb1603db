"""The rounds of a founded run: tells the round machine what happens and carries out what it decides.

    header of a shard   offer     the round machine takes it, or refuses it
    its bytes           receive   checked and buffered; the machine hears how far the contribution is
    the last of them    arrived   measured; with the last shard of a fragment the machine hears that the fragment is in
    with masks          _unmask   before the first Reduce of a round: claims are judged, and what opens the sum is learned
    with noise          _begin_private   likewise: the attempt is counted in the ledger, then contributions are clipped
    by the whole model  _choose   likewise: with robust.scope = "model" contributions are weighed by all their fragments
    effect Reduce       _reduce   admitted, merged, encoded, begun to be written to the journal; its outer step is staged
    effect Commit       _commit   the commit in the journal, durable; then applied in memory, in place; then published
    effect RoundClosed  _close    contributions that are not carried over are dropped, the round is reported

The journal comes before memory, and memory before publishing. Everything runs on the event loop, except what is given to
`Background.in_worker`: that touches the outer state and the disk, one call after the other. What only reads the outer state is
given to `Background.compute`: with `serve --threads` several such calls run at a time, and a commit waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from aggregator.data.contributions import Contributions, ShardUpload
from aggregator.data.masked_rounds import MaskedRounds, SumNotOpened
from aggregator.data.published import CommittedState, PublishedState
from aggregator.data.scores import Scores
from aggregator.resources import Resources
from aggregator.run_feed import (
    Advised,
    ContributionRefused,
    FragmentMerged,
    PeerFaulted,
    PeerQuarantined,
    RoundChanged,
    RoundReport,
    RunEnded,
    StepCommitted,
)
from aggregator.storage.kept_contributions import Kept, KeptContributions, KeptShard
from aggregator.storage.pending_injection import Promised, Sender, check_bytes
from aggregator.storage.privacy_budget import PrivacyBudget
from edit.config.in_force import in_force
from edit.config.run import RunConfig
from edit.durable_files import write_atomic
from edit.errors import (
    LocalProtocolError,
    OutdatedError,
    PluginError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    StorageError,
)
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.merging.injection import Injected, Injection, check_order, check_run
from edit.merging.masked import JudgedClaims, merge_nothing, sum_of
from edit.merging.merge import Measured, Merged, measure
from edit.merging.mergers import Admission, Screened, admission, screen
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.merging.private import Clipped
from edit.merging.robust_merger import Chosen
from edit.merging.trust import after_scores
from edit.records import Commit, round_number
from edit.rounds import events
from edit.rounds.events import Phase
from edit.rounds.machine import RoundMachine
from edit.rounds.work_claims import UsualWork, Work
from edit.trust.mask_plan import FragmentPlan
from edit.trust.masking import Opening
from edit.trust.noise import SecretNoise
from editpb.audit_log import RoundFacts
from editpb.limits import MAX_ENTRY_BYTES
from editpb.messages import ContributionHeader, ScoreReport, SeenHead
from editpb.signed_contributions import check_payload, verified_by_others

__all__ = ["RoundRunner", "Source", "commit_tokens", "weighted_tokens"]

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.25  # the machine hears of one transfer at most this often
# Where a round's contributions came in faster, its peers waited for this machine and not for the links: then nothing of the
# next is staged ahead of its commit, which costs CPU time that other fragments need. 1.2 Gbit/s; small models always are.
_FAST_BYTES_PER_S = 150e6
_FAST_S = 0.05
# Times that the sum of one outer step may fail to be opened; then nothing is merged in it, and the next one begins.
_MASKED_TRIES = 3
_SAID_BYTES = 4096  # of a fragment, and of each contribution to it, beside the vectors: at most, on disk
_NO_SCORERS = 'the run has no scorers: robust.trust is not "loss"'


@dataclass(frozen=True, slots=True)
class Source:
    """A shard of a contribution that was merged, and what that counted for. Its bytes stay until the round closes."""

    shard: ShardUpload
    work: Work


@dataclass(slots=True)
class _Round:
    """What belongs to the open round. A new round gets a new object, so late results of an old one change nothing."""

    round_id: int
    records: dict[int, MergeRecord] = field(default_factory=dict)  # by fragment_id; taken out when they are committed
    staged: dict[int, Staged] = field(default_factory=dict)  # of those for which there was memory; likewise
    reserved_bytes: int = 0  # of the uploads' memory, for what is staged
    tokens: dict[int, int] = field(default_factory=dict)  # by fragment_id: behind what was merged with a weight
    inner_steps: dict[int, int] = field(default_factory=dict)  # likewise
    sources: list[Source] = field(default_factory=list)  # of what is merged, where others verify it
    signed: dict[int, tuple[ContributionHeader, ...]] = field(default_factory=dict)  # of what is merged, for the audit log
    # By peer: the fragments of which something came that named the round, for the audit log.
    offered: dict[str, set[int]] = field(default_factory=dict)
    bytes_in: int = 0  # that arrived while it was open
    first_byte_at: float = math.inf
    last_byte_at: float = 0.0
    commit: Commit | None = None
    promised: Promised | None = None  # what its commit brings of a run above
    injection_fixed: bool = False  # its first fragment has been reduced: the others bring the same injection
    unmasked: asyncio.Task[tuple[JudgedClaims, Opening | None]] | None = None  # with masks, once it is closed
    private: asyncio.Task[tuple[Clipped, SecretNoise]] | None = None  # with privacy of organisations, once it is closed
    chosen: asyncio.Task[Chosen] | None = None  # with robust.scope = "model", once it is closed

    @property
    def injection(self) -> Injection | None:
        """What its commit brings of a run above."""
        return self.promised.injection if self.promised is not None else None


class RoundRunner:
    """One founded run's rounds.

    Args:
        outer: the outer state; only the worker thread changes it.
        first_round_id: larger than any id of an earlier process.
        awaited: the peers that the first round waits for, and for how many seconds.
        policy: what each contribution passes before it is merged; None: what the configuration chooses.
        run_id: the run's; it is in the keys of masks.
    """

    def __init__(
        self,
        outer: OuterState,
        config: RunConfig,
        resources: Resources,
        published: PublishedState,
        *,
        first_round_id: int,
        awaited: tuple[Collection[str], float] = ((), 0.0),
        policy: Admission | None = None,
        run_id: str = "",
    ) -> None:
        self.outer, self.published = outer, published
        self.last_closed: tuple[int, bool, str] = (0, False, "")  # round_id, committed, reason
        self._store, self._background = resources.store, resources.background
        self._run_feed, self._clock = resources.feed, resources.clock
        self._deadlines_file = resources.deadlines
        self._policy = policy or admission(config)
        # With privacy.level = "organisation"; None: there is no noise.
        self._budget = resources.privacy
        if config.privacy.of_organisations:
            if self._budget is None:
                raise LocalProtocolError("a run with differential privacy of organisations needs a ledger")
            self._budget.check(outer.outer_step)
        # Others merge the same contributions once more: they are kept until the round closes.
        self._verified = verified_by_others(config)
        self._uploads = resources.uploads
        # The masked round that is open; None: the run has no masks.
        self.masked: MaskedRounds | None = None
        if config.secagg.enabled:
            now = resources.clock.monotonic
            self.masked = MaskedRounds(
                run_id, config, resources.background, now, self._restrict, self._masks_failed, self._late_for_masks
            )
        codecs = self.masked.codec if self.masked is not None else config.codec.uplink
        # With robust.trust = "loss": what scorers say of the last outer step.
        self.scores = Scores(self._store.update(outer.outer_step)) if config.robust.scored else None
        # The outer step whose sum failed last without a peer to blame, how often, and why.
        self._failed_sum = (0, 0, "")
        self._contributions = Contributions(outer.schema, codecs, resources.uploads)
        self._told: dict[str, float] = {}  # peer_id -> when the machine last heard of its transfer
        self._round: _Round | None = None
        self._bytes_per_s = 0.0  # of the contributions to the last round that was committed, while they came in
        self._checkpoint_every = config.storage.checkpoint_every
        self._quorum = config.rounds.quorum if config.rounds.merging == "rounds" else 1
        self._due = partial(
            fragments_due, fragments=len(outer.schema.fragments), groups=config.sync.groups, pattern=config.sync.pattern
        )
        self.misfits: dict[str, str] = {}  # by member: that it has seen another audit log than this one, and what that means
        self._told_of_claims: set[str] = set()  # the members of whose claims was said that they are not believed
        self.machine = RoundMachine(
            config.rounds,
            due=self._due,
            outer_step=outer.outer_step,
            outer_steps=config.sync.outer_steps,
            first_round_id=first_round_id,
            stop_tokens=config.sync.tokens,
            tokens=self._store.tokens,
            work=UsualWork.of(config),
            idle_s=self._idle_s(),
            overlap=config.sync.overlap,
            awaited=awaited[0],
            awaits_until=self._clock.monotonic() + awaited[1],
            whole=self.masked is not None or self._budget is not None or config.robust.of_model,
            masked=self.masked is not None,
            ended=self._budget.used_up if self._budget is not None else "",
        )
        self._load_deadlines()

    # ---- contributions -------------------------------------------------------------------------------------------------

    def offer(self, header: ContributionHeader) -> ShardUpload | None:
        """Take the header of a shard; return the upload for its bytes, or None: the fragment is whole, send no bytes.

        Raises StaleError, RefusedError, RemoteProtocolError.
        """
        if header.schema_hash != self.outer.schema.schema_hash:
            raise RefusedError("another model: the contribution's schema_hash is not the run's")
        self._check_masked(header)
        if header.seen is not None and (why := self.note_seen(header.peer_id, header.seen)):
            raise RefusedError(why)
        refused = self.feed(
            events.Offered(header.peer_id, header.round_id, header.outer_step, header.fragment_id, header.inner_steps)
        )
        if refused is not None:
            raise StaleError(refused.reason) if refused.stale else RemoteProtocolError(refused.reason)
        if self._round is not None and self._round.round_id == header.round_id:
            self._round.offered.setdefault(header.peer_id, set()).add(header.fragment_id)
        return self._contributions.declare(header, self._due(header.outer_step))

    def _check_masked(self, header: ContributionHeader) -> None:
        """Raise unless the contribution is masked exactly where the run has masks, by a peer that shares the round's keys."""
        if self.masked is None:
            if header.norm is not None:
                raise RemoteProtocolError(f"a contribution of {header.peer_id} says its norm, which is measured here")
            return
        if header.norm is None:
            raise RemoteProtocolError(f"a contribution of {header.peer_id} lacks its norm, which a run with masks asks for")
        if header.round_id == self.machine.round_id and (why := self.masked.refusal(header.peer_id)):
            raise StaleError(why)

    def note_seen(self, peer_id: str, seen: SeenHead) -> str:
        """Return why the audit log does not begin with what the peer has seen of it, '' where it does; warn the operator.

        What the log's key has not signed is the peer's fault: raises RemoteProtocolError. What it has signed is not: this log
        is then not the one that the peer was shown.
        """
        if (entries := self._store.entries) is None:
            raise RemoteProtocolError(f"{peer_id} names a head of an audit log; the run keeps none")
        why, signed = entries.misfit(seen)
        if why and not signed:
            raise RemoteProtocolError(f"{peer_id} says that it has seen {why}")
        if why and peer_id not in self.misfits:
            why = f"has seen {why}: the coordinator goes on from an old copy of its folder, or two of them serve this run"
            self.misfits[peer_id] = f"{peer_id} {why}"
            self._run_feed.publish(Advised(peer_id, why))
        return self.misfits[peer_id] if why else ""

    async def receive(self, shard: ShardUpload, offset: int, data: bytes | memoryview) -> None:
        """Take one chunk of a shard; one of a shard that was merged meanwhile has no effect. Raises as `Upload.write`."""
        try:
            await shard.upload.write(offset, data)
        except StaleError:
            if not shard.merged:
                raise
            return
        now, peer_id = self._clock.monotonic(), shard.header.peer_id
        if self._round is not None:
            self._round.first_byte_at = min(self._round.first_byte_at, now)
        contribution = self._contributions.of_peer(peer_id)
        if contribution is not None and now - self._told.get(peer_id, -math.inf) >= _PROGRESS_S:
            self._told[peer_id] = now
            received = contribution.received_bytes
            total = max(received, contribution.total_bytes)
            self.feed(events.Progress(peer_id, shard.header.round_id, received, total))

    async def arrived(self, shard: ShardUpload) -> None:
        """Measure a shard whose bytes are all in; tell the machine when its fragment is whole.

        Raises StaleError, StorageError.
        """
        contribution, fragment = self._contributions.find(shard.header), self._contributions.fragment_of(shard)
        if shard.norm is not None:
            return
        came_at = self._clock.monotonic()  # how long it waits to be hashed and measured says nothing of its link
        try:
            norm = await self._background.compute(_measured, shard)
        except StorageError:
            self._contributions.fragment_of(shard)  # StaleError when it was dropped meanwhile
            raise
        if shard.norm is not None:
            return
        if self._contributions.find(shard.header) is not contribution:
            raise StaleError(f"round {round_number(shard.header.round_id)} ended while this contribution to it was measured")
        fragment.check_current(shard)
        if self._round is not None:
            self._round.bytes_in += shard.header.total_bytes
            self._round.last_byte_at = max(self._round.last_byte_at, came_at)
        if fragment.measured(shard, norm):
            header = shard.header
            if refused := self.feed(events.Arrived(header.peer_id, header.round_id, header.fragment_id)):
                raise StaleError(refused.reason)

    def fault(self, peer_id: str, round_id: int, reason: str) -> None:
        """Exclude a peer whose bytes broke the protocol from the round that its contribution names, unless it is already."""
        if self.machine.is_out(peer_id):
            return
        self._run_feed.publish(PeerFaulted(peer_id, round_id, reason))
        self.feed(events.Faulted(peer_id, round_id, reason))

    def withdraw(self, peer_id: str, what: str, reason: str) -> None:
        """Drop all that a member delivered, also what was merged early; a round that is closed is merged with it.

        Args:
            what: happened to it, as the reason of a round that is aborted says it: "was evicted".
            reason: a stream that still sends gets it.
        """
        if self.scores is not None:
            self.scores.withdraw(peer_id)
        if self.machine.is_merging(peer_id):
            return
        if self.machine.is_merged_early(peer_id) or self._is_brought_early(peer_id):
            why = f"{peer_id} {what}, and a part of what it sent is merged already"
            self.feed(events.RoundFailed(self.machine.round_id, why))
        self.feed(events.Withdrawn(peer_id))
        self._contributions.drop(peer_id, reason)

    def _is_brought_early(self, peer_id: str) -> bool:
        """Return whether what this region brought is merged with a part of the round while the collection is still open."""
        promised = self._round.promised if self._round is not None else None
        brought = promised is not None and promised.sender is not None and promised.sender.name == peer_id
        return brought and self.machine.phase is Phase.COLLECTING

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the open round was merged from so far, where others verify it."""
        return tuple(self._round.sources) if self._round is not None else ()

    def upload(self, peer_id: str) -> tuple[int, int]:
        """Return (bytes so far, bytes in all) of the contribution that is held of this peer; (0, 0): none is."""
        contribution = self._contributions.of_peer(peer_id)
        return (contribution.received_bytes, contribution.total_bytes) if contribution is not None else (0, 0)

    # ---- rounds --------------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> events.Refused | None:
        """Hand an event to the round machine and carry out the effects; return the refusal of what the event offers.

        An exception is a bug after which effects may be lost, and the run would wait for their results for ever: it ends the
        process, whoever called.
        """
        try:
            return self._carry_out(event)
        except Exception as error:
            self._background.fail(error)
            raise

    def _carry_out(self, event: events.Event) -> events.Refused | None:
        before = (self.machine.phase, self.machine.round_id)
        refused: events.Refused | None = None
        for effect in self.machine.handle(event, self._clock.monotonic()):
            match effect:
                case events.Refused() if isinstance(event, events.Offered | events.Arrived):
                    refused = effect
                case events.Refused(peer_id, reason):
                    self._run_feed.publish(ContributionRefused(peer_id, reason))
                    self._contributions.drop(peer_id, reason)
                case events.Quarantined(peer_id, seconds, reason):
                    self._run_feed.publish(PeerQuarantined(peer_id, seconds, reason))
                case events.RoundOpened(round_id, outer_step, expected):
                    self._round, due = _Round(round_id), self._due(outer_step)
                    self._store.round_opened(round_id)
                    self.published.open_round(round_id, due)
                    if self.masked is not None:
                        self.masked.open(round_id, outer_step, expected, partial(self._plans, due))
                case events.Reduce():
                    self._background.spawn(self._reduce(effect))
                case events.Commit():
                    self._background.spawn(self._commit(effect))
                case events.RoundClosed():
                    self._close(effect)
                case events.RunFinished(outer_step):
                    self._contributions.keep((), "the run is finished")
                    self._background.spawn(self._finish(outer_step))
        if (self.machine.phase, self.machine.round_id) != before:
            self._run_feed.publish(RoundChanged(self.machine.phase.value, self.machine.round_id))
        if self.masked is not None:
            self._tell_masks(self.masked, event)
        return refused

    @staticmethod
    def _tell_masks(masked: MaskedRounds, event: events.Event) -> None:
        """Pass on what concerns the keys. After the round machine knows it: if a masked round fails by that, the next one opens
        at once, and must not expect a peer that is lost."""
        match event:
            case events.Tick():
                masked.tick()
            case events.MemberLost(peer_id):
                masked.left(peer_id)
            case events.MemberReady(peer_id):
                masked.returned(peer_id)

    async def _reduce(self, effect: events.Reduce) -> None:
        """Merge one fragment and write it to the journal. Any exception fails the round."""
        current, fragment_id, began = self._round, effect.fragment_id, self._clock.monotonic()
        if current is None or current.round_id != effect.round_id:
            return
        try:
            held = map(self._contributions.of_peer, effect.peers)
            claimed = [one.whole(fragment_id, self.machine.outer_step) for one in held if one is not None]
            measured = self._bounded(claimed)
            kept = self._store.kept
            sources = self._sources(fragment_id, measured) if self._verified or kept is not None else []
            signed = self._headers(fragment_id, measured) if self._store.entries is not None else ()
            if not current.injection_fixed:
                current.promised, current.injection_fixed = self._store.injections.pending, True
            run: Callable[..., Awaitable[tuple[MergeRecord, Future[None]]]] = self._background.in_worker
            if self._budget is not None:
                if current.private is None:
                    current.private = asyncio.ensure_future(self._begin_private(effect, self._budget))
                merge = partial(self._merge_private, effect, measured, current.injection, *await current.private)
            elif self.outer.config.robust.of_model:
                if current.chosen is None:
                    current.chosen = asyncio.ensure_future(self._choose(effect))
                merge = partial(self._merge_chosen, effect, measured, current.injection, await current.chosen)
            elif self.masked is None:
                merge, run = partial(self._merge, effect, measured, current.injection), self._background.compute
            else:
                if current.unmasked is None:
                    current.unmasked = asyncio.ensure_future(self._unmask(effect.peers))
                merge = partial(self._merge_sum, effect, measured, current.injection, *await current.unmasked)
            record, written = await run(merge)
            if kept is not None:
                await self._background.in_worker(self._keep, kept, effect.round_id, fragment_id, sources)
            await self._stage(current, record)
            await asyncio.wrap_future(written)
        except Exception as error:
            self._fail(effect.round_id, error)
            return
        current.sources += sources if self._verified else ()
        current.signed[fragment_id] = signed
        current.records[fragment_id] = record
        current.tokens[fragment_id] = weighted_tokens(record, {one.peer_id: one.tokens for one in measured})
        current.inner_steps[fragment_id] = weighted_tokens(record, {one.peer_id: one.inner_steps for one in measured})
        seconds = self._clock.monotonic() - began
        self._run_feed.publish(FragmentMerged(effect.round_id, fragment_id, len(measured), seconds))
        self.feed(events.Reduced(effect.round_id, fragment_id))

    async def _stage(self, current: _Round, record: MergeRecord) -> None:
        """Stage the outer step of a merged fragment and show it to the peers; else it is made at the commit.

        Where the links are slow, and there is memory for it: in place of the contributions to this fragment.
        """
        i = record.fragment_id
        if self._round is not current:
            return
        if not self._verified:
            self._contributions.merged(i, [verdict.peer_id for verdict in record.verdicts])
        if self._bytes_per_s > _FAST_BYTES_PER_S or not self._uploads.reserve(size := self.outer.update_bytes(i)):
            return
        current.reserved_bytes += size
        staged = current.staged[i] = await self._background.compute(self.outer.stage, record, current.injection)
        if staged.payload is not None:
            self.published.stage(current.round_id, i, staged.payload)

    def _sources(self, fragment_id: int, measured: Sequence[Measured]) -> list[Source]:
        return [
            Source(shard, Work(one.inner_steps, one.tokens))
            for one in measured
            for shard in self._contributions.shards(fragment_id, one.peer_id)
        ]

    def _headers(self, fragment_id: int, measured: Sequence[Measured]) -> tuple[ContributionHeader, ...]:
        return tuple(shard.header for one in measured for shard in self._contributions.shards(fragment_id, one.peer_id))

    def _bounded(self, claimed: Sequence[Measured]) -> list[Measured]:
        """Return the contributions with what their inner steps and tokens count for; warn once of a member that claims more."""
        work = self.machine.counted({one.peer_id: Work(one.inner_steps, one.tokens) for one in claimed})
        for one in claimed:
            counts = work[one.peer_id]
            if (counts.inner_steps < one.inner_steps or counts.tokens < one.tokens) and one.peer_id not in self._told_of_claims:
                self._told_of_claims.add(one.peer_id)
                self._run_feed.publish(Advised(one.peer_id, _unbelieved(one, counts)))
        return [replace(one, inner_steps=work[one.peer_id].inner_steps, tokens=work[one.peer_id].tokens) for one in claimed]

    def _merge(
        self, effect: events.Reduce, measured: Sequence[Measured], injection: Injection | None
    ) -> tuple[MergeRecord, Future[None]]:
        """Merge one fragment and begin to write it. Changes nothing but the journal."""
        outer, fragment_id = self.outer, effect.fragment_id
        screened = screen(self._policy, outer.schema.fragments[fragment_id], measured)
        self._refuse_too_few(effect, screened)
        return self._begin(effect, screened.and_rejected(outer.reduce(fragment_id, screened.admitted)), injection)

    def _keep(self, kept: KeptContributions, round_id: int, fragment_id: int, sources: Sequence[Source]) -> None:
        self._store.check_open(round_id)
        kept.add(round_id, fragment_id, (Kept(one.shard.header, one.work, one.shard.read().data) for one in sources))

    def _begin(self, effect: events.Reduce, merged: Merged, injection: Injection | None) -> tuple[MergeRecord, Future[None]]:
        record = self.outer.record(merged)
        return record, self._store.begin_fragment(effect.round_id, record, injection)

    # ---- by the whole model --------------------------------------------------------------------------------------------

    async def _choose(self, effect: events.Reduce) -> Chosen:
        """Weigh the complete contributions as a whole. Raises RefusedError, StorageError."""
        claims = self._complete(effect.peers)
        bounded = {i: self._bounded(claimed) for i, claimed in claims.items()}

        def work() -> Chosen:
            return self.outer.choose(bounded, self._rejected_anywhere(effect, bounded))

        return await self._background.in_worker(work)

    def _merge_chosen(
        self, effect: events.Reduce, measured: Sequence[Measured], injection: Injection | None, chosen: Chosen
    ) -> tuple[MergeRecord, Future[None]]:
        """As `_merge`, by what the whole contributions count for."""
        return self._begin(effect, self.outer.reduce_chosen(effect.fragment_id, measured, chosen), injection)

    def _complete(self, peers: Sequence[str]) -> dict[int, list[Measured]]:
        """Return what these peers say they have contributed, by fragment."""
        held = [one for one in map(self._contributions.of_peer, peers) if one is not None]
        step = self.machine.outer_step
        return {i: [one.whole(i, step) for one in held] for i in self._due(step)}

    def _rejected_anywhere(self, effect: events.Reduce, contributions: Mapping[int, Sequence[Measured]]) -> set[str]:
        """Return the peers that the policy rejects in a fragment. Raises RefusedError where it leaves too few in one."""
        rejected = set[str]()
        for i, claimed in contributions.items():
            screened = screen(self._policy, self.outer.schema.fragments[i], claimed)
            self._refuse_too_few(effect, screened)
            rejected |= {verdict.peer_id for verdict in screened.rejected}
        return rejected

    # ---- with scorers --------------------------------------------------------------------------------------------------

    def contributed(self, outer_step: int) -> list[KeptShard]:
        """Return what was merged in the commit to an outer step, as it is kept for scorers; it reads a few files.

        Raises RefusedError where the run has no scorers, GoneError, StorageError.
        """
        if self.scores is None or self._store.kept is None:
            raise RefusedError(_NO_SCORERS)
        return self._store.kept.shards(outer_step, self.published.schema)

    async def score(self, scorer: str, report: ScoreReport) -> None:
        """Take what a scorer says of the contributions to the last outer step; it counts with the next commit.

        Raises as `Scores.report`, StorageError where it cannot be logged, and RefusedError where the run has no scorers.
        """
        if self.scores is None:
            raise RefusedError(_NO_SCORERS)
        with self.scores.report(scorer, report.outer_step, report.scores) as new:
            if new and self._store.audit is not None:
                await self._background.in_worker(self._store.audit.score, scorer, report)
        if new:
            said = ", ".join(f"{peer_id} {value:+.4g}" for peer_id, value in sorted(report.scores.items()))
            _log.info("scores of outer step %d by %s: %s", report.outer_step, scorer, said)

    # ---- with noise ----------------------------------------------------------------------------------------------------

    async def _begin_private(self, effect: events.Reduce, budget: PrivacyBudget) -> tuple[Clipped, SecretNoise]:
        """Count the attempt at this outer step, on disk; then return what counts of each contribution, and new noise.

        Nothing is counted while the disk would refuse what follows: a full disk costs no budget, however often it is tried. The
        run ends with this round where no other attempt may follow. Raises RefusedError, StorageError.
        """
        claims = self._complete(effect.peers)
        room = self._room(claims)

        def work() -> tuple[Clipped, SecretNoise]:
            clipped = self.outer.clip(claims, self._rejected_anywhere(effect, claims))
            self._store.prove_room(room)
            budget.reserve()
            return clipped, SecretNoise()

        try:
            return await self._background.in_worker(work)
        finally:
            if reason := budget.used_up:
                self.feed(events.EndRun(reason))

    def _room(self, claims: Mapping[int, Sequence[Measured]]) -> int:
        """Return how many bytes the fragments and the commit of a round take on disk, at most. claims: by fragment."""
        vectors = 1 + (self._store.injections.pending is not None)  # what is left out of the payload, and what is injected
        merged = sum(self.outer.update_bytes(i) + 4 * vectors * self.outer.schema.fragments[i].numel for i in claims)
        said = _SAID_BYTES * sum(1 + len(claimed) for claimed in claims.values())
        return merged + said + (2 * MAX_ENTRY_BYTES if self._store.audit is not None else 0)  # in the journal, and in the log

    def _merge_private(
        self,
        effect: events.Reduce,
        measured: Sequence[Measured],
        injection: Injection | None,
        clipped: Clipped,
        noise: SecretNoise,
    ) -> tuple[MergeRecord, Future[None]]:
        """As `_merge`, with noise in it before it is written anywhere."""
        return self._begin(effect, self.outer.reduce_private(effect.fragment_id, measured, clipped, noise.normal), injection)

    # ---- with masks ----------------------------------------------------------------------------------------------------

    def _plans(self, due: Sequence[int]) -> list[FragmentPlan]:
        return [self.outer.plan(i) for i in due]

    def _restrict(self, round_id: int, peers: frozenset[str]) -> None:
        self.feed(events.Restricted(round_id, peers))

    def _masks_failed(self, round_id: int, reason: str, blamed: Sequence[str]) -> None:
        """The keys of a round came to nothing, or its sum is not opened."""
        if self._round is None or self._round.round_id != round_id:
            return
        for peer_id in blamed:
            self._run_feed.publish(PeerFaulted(peer_id, round_id, reason))
        self.feed(events.RoundFailed(round_id, reason, tuple(blamed)))

    def _late_for_masks(self, round_id: int, peer_id: str, able: frozenset[str]) -> None:
        """A peer came after the keys were shared. Where the round makes no quorum without it, it fails at once: in the next one
        there is room for all, and the others would only wait for the deadline."""
        machine = self.machine
        if machine.round_id != round_id or machine.phase is not Phase.COLLECTING or len(able | machine.arrived) >= self._quorum:
            return
        reason = f"too few share keys without {peer_id}, which came too late for them: {len(able)} of quorum {self._quorum}"
        self._masks_failed(round_id, reason, ())

    async def _unmask(self, peers: Sequence[str]) -> tuple[JudgedClaims, Opening | None]:
        """Judge what the complete peers say, and let the others open the sum of those who are sound.

        None: nothing is merged. Either so many are not sound that the sum of the others is not opened: tried again, they would
        have trained on and be further off. Or it was tried often enough for this outer step: peers that helped to open a sum of
        it do not open one that differs by few, so where that sum came to no commit, and one of its peers is gone, none of the
        others ever opens another. And who sends what does not fit its lanes or its norm cannot be told from the others, and may
        do so for ever. Raises as `MaskedRounds.close_with`.
        """
        assert self.masked is not None
        step = self.machine.outer_step
        judged = await self._background.in_worker(self.outer.judge_claims, self._complete(peers))
        if shortage := judged.shortage(self.masked.least):
            _log.warning("outer step %d: %s; nothing is merged in it", step + 1, shortage)
            return judged, None
        if self._tries(step) < _MASKED_TRIES:
            try:
                return judged, await self.masked.close_with(judged.survivors)
            except SumNotOpened as error:
                if error.blamed or self._tries(step) < _MASKED_TRIES - 1:
                    raise
                self._count_try(step, str(error))
        _, tries, reason = self._failed_sum
        said = "outer step %d: its sum failed to be opened %d times (%s); nothing is merged in it"
        _log.warning(said, step + 1, tries, reason)
        return judged, None

    def _tries(self, outer_step: int) -> int:
        """Return how often the sum after this outer step has failed without a peer to blame."""
        step, tries, _ = self._failed_sum
        return tries if step == outer_step else 0

    def _count_try(self, outer_step: int, reason: str) -> None:
        self._failed_sum = (outer_step, self._tries(outer_step) + 1, reason)

    def _merge_sum(
        self,
        effect: events.Reduce,
        measured: Sequence[Measured],
        injection: Injection | None,
        judged: JudgedClaims,
        opening: Opening | None,
    ) -> tuple[MergeRecord, Future[None]]:
        """As `_merge`, of the survivors' sum, from which the masks are taken off. opening: None: nothing is merged.

        Raises SumNotOpened where the sum is not what its peers say: nobody can tell whose vector is wrong.
        """
        assert self.masked is not None
        i = effect.fragment_id
        if opening is None:
            return self._begin(effect, merge_nothing(i, measured, judged), injection)
        plan, fragment = self.masked.plan(i), self.outer.schema.fragments[i]
        total = sum_of(fragment, plan, [one for one in measured if one.peer_id in opening.survivors])
        opening.apply(total.words, i, 0)
        opening.apply(total.lanes, i, fragment.numel)
        try:
            opening.check(total.words, total.lanes, i)
            merged = self.outer.reduce_sum(plan, total, measured, judged, opening.survivors)
        except RemoteProtocolError as error:
            raise SumNotOpened(str(error)) from error
        return self._begin(effect, merged, injection)

    def _refuse_too_few(self, effect: events.Reduce, screened: Screened) -> None:
        """Raise RefusedError when the policy has left fewer contributions than the quorum."""
        for reason in screened.reasons:
            _log.info("round %d, fragment %d: rejected %s", round_number(effect.round_id), effect.fragment_id, reason)
        if screened.rejected and len(screened.admitted) < self._quorum:
            few = f"{len(screened.admitted)} of quorum {self._quorum}"
            raise RefusedError(f"too few are admitted: {few} (rejected {'; '.join(screened.reasons)})")

    async def _commit(self, effect: events.Commit) -> None:
        """Make the commit durable, then apply and publish it.

        An exception before it is on disk fails the round. One after that ends the process: peers must not hear that a commit
        failed which a restart replays.
        """
        current, outer = self._round, self.outer
        if current is None or current.round_id != effect.round_id:
            return
        on_disk = False

        def commit_and_apply() -> tuple[Commit, CommittedState]:  # one call: a process that stops must not end in between
            nonlocal on_disk
            ready, entry = outer.stage_plugins(records, injection, staged), ""
            trust = after_scores(outer.trust, scored) if scored else None
            if (entries := self._store.entries) is not None:
                ready = outer.stage_all(records, injection, ready) if entries.of_results else ready
                ordered, results = sorted(records, key=lambda record: record.fragment_id), ready if entries.of_results else None
                entry = entries.commit(outer, ordered, results, signed, replace(facts, trust=trust))
            step, reason = effect.outer_step, effect.reason
            inner_steps, brings = facts.trained[0], facts.injected
            due = [record.fragment_id for record in records]
            kept = self._store.kept
            with kept.committing(step) if kept is not None else contextlib.nullcontext():
                self._store.append_commit(
                    effect.round_id, step, reason, tokens, brings, outer.digest, entry, inner_steps, trust, due
                )
                on_disk = True
            commit = outer.commit(effect.round_id, reason, records, injection, ready, trust, each=self._background.each)
            self._store.applied(commit)
            if step % self._checkpoint_every == 0:
                self._store.begin_segment(step)
            return commit, CommittedState.of(outer)

        scorers, scored = self.scores.begin_commit() if self.scores is not None else ((), {})
        try:
            records, current.records = list(current.records.values()), {}
            staged, current.staged = current.staged, {}
            tokens, injection, signed = self._tokens(current), current.injection, current.signed
            merged: dict[str, set[int]] = {}
            for header in itertools.chain.from_iterable(signed.values()):
                merged.setdefault(header.peer_id, set()).add(header.fragment_id)
            facts = RoundFacts(
                round_id=effect.round_id,
                outer_step=effect.outer_step,
                reason=effect.reason,
                missing=effect.missing,
                unmerged=current.offered.keys() - merged,
                partly={peer: left for peer in merged if (left := current.offered.get(peer, set()) - merged[peer])},
                injected=injection.brings if injection is not None else None,
                privacy=self._budget.said() if self._budget is not None else None,
                agreed=self.masked.agreed if self.masked is not None else None,
                trained=self._trained(current),
                scorers=scorers,
            )
            await self._background.computed()  # what reads the outer state, for a round that has failed
            self.published.begin()
            commit, committed = await self._background.in_worker(commit_and_apply)
        except Exception as error:
            if on_disk:
                raise
            self.published.undo()
            if self.scores is not None:
                self.scores.undo_commit()
            self._fail(effect.round_id, error)
            return
        current.commit = commit
        if self.scores is not None:
            self.scores.committed(commit)
        self.published.show(committed)
        self._store.injections.committed(committed.injected)
        self._run_feed.publish(StepCommitted(commit, effect.missing))
        self.feed(events.CommitSucceeded(effect.round_id, tokens))
        if effect.outer_step % self._checkpoint_every == 0:
            await self.checkpoint()

    def _tokens(self, current: _Round) -> int:
        """The tokens behind a commit: with groups each fragment counts for its share of the model, the others for nothing."""
        return commit_tokens(self.outer.schema, current.tokens)

    def _trained(self, current: _Round) -> tuple[int, int]:
        """The inner steps and tokens behind a commit, counted alike."""
        return commit_tokens(self.outer.schema, current.inner_steps), self._tokens(current)

    def _fail(self, round_id: int, error: Exception) -> None:
        """A merge or a commit raised: end the round; nothing of it is applied."""
        if isinstance(error, SumNotOpened):
            if self.machine.round_id == round_id and not error.blamed:
                self._count_try(self.machine.outer_step, str(error))
            self._masks_failed(round_id, str(error), error.blamed)
            return
        reason = str(error)
        if not isinstance(
            error, StorageError | RefusedError | OutdatedError | PluginError
        ):  # a bug, or bytes that passed every check before
            reason = f"{type(error).__name__}: {error}"
            _log.error("round %d failed: %s", round_number(round_id), reason, exc_info=error)
        self.feed(events.RoundFailed(round_id, reason))

    def _close(self, effect: events.RoundClosed) -> None:
        """Drop what is not carried over, and report the round."""
        current, self._round = self._round, None
        self._store.round_opened(0)
        self.published.end_round()
        if self.masked is not None:
            self.masked.end(effect.reason)
        if current is not None:
            self._uploads.release(current.reserved_bytes)
            if effect.committed:
                self._bytes_per_s = current.bytes_in / max(current.last_byte_at - current.first_byte_at, _FAST_S)
        self._contributions.keep(effect.carried, "its round is over")
        self.last_closed = (effect.round_id, effect.committed, effect.reason)
        commit = current.commit if current is not None else None
        fragments = commit.fragments if commit is not None else ()
        trained = self._trained(current) if current is not None else (0, 0)
        taken_with = in_force(self.outer.config, effect.outer_step - 1, trained)
        report = RoundReport(
            round_id=effect.round_id,
            outer_step=effect.outer_step,
            committed=effect.committed,
            reason=effect.reason,
            seconds=effect.seconds,
            bytes_in=current.bytes_in if current is not None else 0,
            bytes_out=sum(len(fragment.payload.data) for fragment in fragments if fragment.payload is not None),
            missing=effect.missing,
            digest=commit.digest if commit is not None else "",
            fragments=tuple(replace(fragment, payload=None) for fragment in fragments),
            carried=effect.carried,
            every=taken_with.every,
            batch=taken_with.batch,
            outer_lr=taken_with.lr,
            outer_momentum=taken_with.momentum,
        )
        self._run_feed.publish(report)

    async def _finish(self, outer_step: int) -> None:
        await self.checkpoint()
        self._run_feed.publish(RunEnded(outer_step, self.machine.tokens))

    # ---- checkpoints ---------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Write the state and the measured times. One that cannot be written loses nothing: the journal goes on."""
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
        """Read the measured times of an earlier start. Without them the ceiling counts until there are new ones."""
        if self._deadlines_file is None or not self._deadlines_file.exists():
            return
        try:
            self.machine.deadlines.load(self._deadlines_file.read_text())
        except (OSError, ValueError) as error:
            _log.warning("%s: is passed over (%s); the peers' times are measured again", self._deadlines_file, error)

    def _idle_s(self) -> float:
        """Return for how long the run stood still before this start, in seconds, as far as the file of measured times tells."""
        if self._deadlines_file is None or not self._deadlines_file.exists():
            return 0.0
        return max(0.0, self._clock.unix() - self._deadlines_file.stat().st_mtime)

    # ---- what a run above brings ---------------------------------------------------------------------------------------

    @property
    def accepted(self) -> Injected | None:
        """What of a run above comes in with the next commit: it is on disk, or in a commit under way."""
        coming = self._store.injections.pending or (self._round.promised if self._round is not None else None)
        return coming.injection.brings if coming is not None else None

    def check_injection(self, brings: Injected, base: Injected | None, replaces: bool) -> None:
        """Raise unless this run takes it as it stands; the errors are those of `edit.merging.injection`."""
        check_run(self.outer.config)
        check_order(brings, base, replaces, self.published.injected, self.published.outer_step)

    async def inject(self, injection: Injection, claimed_digest: str, sender: Sender) -> None:
        """Write an injection, and bring it in with the next commit. Raises as `check_injection`, StorageError."""

        def save() -> None:
            check_bytes(injection, self.outer.schema, claimed_digest)
            self._store.injections.save(injection, sender)

        await self._background.in_worker(save)
        self.check_injection(injection.brings, injection.base, injection.replaces)  # a commit may have come meanwhile
        self._store.injections.pending = Promised(injection, sender)
        _log.info("outer step %d of run %s comes in with the next commit", injection.brings.upper_step, injection.brings.run_id)


def weighted_tokens(record: MergeRecord, tokens: Mapping[str, int]) -> int:
    """Return the tokens behind what was merged of a fragment with a weight; of inner steps likewise. tokens: by peer_id."""
    return sum(tokens[verdict.peer_id] for verdict in record.verdicts if verdict.weight > 0)


def commit_tokens(schema: Schema, tokens: Mapping[int, int]) -> int:
    """Return the tokens, or inner steps, behind a commit: a fragment's count for its share of the model.

    tokens: by fragment_id.
    """
    return sum(count * schema.fragments[i].numel for i, count in tokens.items()) // schema.numel


def _measured(shard: ShardUpload) -> float:
    """Return the norm of a shard that is in. Raises RemoteProtocolError for other bytes than were signed, StorageError."""
    encoded = shard.read()
    check_payload(shard.header, encoded.data)
    return measure(encoded) if shard.header.norm is None else shard.header.norm


def _unbelieved(claimed: Measured, counts: Work) -> str:
    return (
        f"says {claimed.inner_steps} inner steps and {claimed.tokens} tokens are behind a contribution; they count as "
        f"{counts.inner_steps} and {counts.tokens}: if that is wrong, inner.batch_size, inner.accumulation, model.context or "
        "sync.every are not what it trains with"
    )
