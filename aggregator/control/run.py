"""The run in one process: its life, the operator's orders, and what follows in the run from each event on its feed.

Who attends is `aggregator.control.attendance`'s, the first parameters are `aggregator.control.founding`'s, rounds and
contributions are `aggregator.data.round_runner`'s. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from aggregator.control.attendance import Attendance, Attendances
from aggregator.control.founding import Founding, Transfer
from aggregator.control.history import History
from aggregator.control.membership import MemberState
from aggregator.control.pace_advice import PaceAdvice, impossible, unanchored
from aggregator.control.schemas import Schemas, builtin_schema
from aggregator.control.shown_settings import settings_of
from aggregator.control.views import founded_view, founding_view
from aggregator.data.published import PublishedState
from aggregator.data.round_runner import RoundRunner
from aggregator.resources import Resources
from aggregator.run_feed import (
    Advised,
    Approved,
    Consented,
    MachineReplaced,
    MemberChanged,
    MemberEnrolled,
    OrderGiven,
    RankLost,
    RoundChanged,
    RoundReport,
    RunEnded,
    RunEvent,
    RunFounded,
    StepCommitted,
)
from aggregator.storage.configurations import Configurations
from aggregator.storage.cosignatures import Cosignatures
from aggregator.storage.high_water import Mark
from aggregator.storage.pending_injection import Promised, Sender
from aggregator.storage.privacy_budget import PrivacyBudget
from aggregator.storage.store import Entries
from edit.config.run import RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError, StorageError, TransportError
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from edit.merging.private import noise_line
from edit.rounds import events
from edit.rounds.deadlines import PeerPhase
from edit.rounds.events import Phase
from editpb.approvals import approval_key, governance_of
from editpb.consents import check_consent
from editpb.limits import one_line
from editpb.messages import (
    Approval,
    ConfigChange,
    Configuration,
    Consent,
    Cosignature,
    FoundHeader,
    Heartbeat,
    PeerState,
    Proposal,
    View,
)
from editpb.run_status import KEPT_ROUNDS, Setting
from editpb.signed_contributions import config_digest

__all__ = ["Run"]

_log = logging.getLogger(__name__)

_PAUSED = "paused by the operator; `resume` lets it go on"
_TICK_S = 0.25  # how often leases and deadlines are looked at


class Run:
    """One run. Call `start` once on the event loop, `close` at the end.

    It subscribes to the feed after those who subscribed before, so the log and metrics.jsonl have an event before its
    consequences.

    Args:
        first_round_id: larger than any round id of an earlier process.
        aggregator: which of the run's aggregators this is; 0 is the coordinator.
        awaited: the peers that the first round waits for, and for how many seconds.
        outer: the state that the run goes on from; None: what the store recovers, or the founder brings.
        configurations: those of the run, of which `config` is the one in force; None: nobody counts them.

    Raises ConfigError when there are more aggregators than fragments.
    """

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        resources: Resources,
        *,
        first_round_id: int,
        aggregator: int = 0,
        awaited: tuple[Collection[str], float] = ((), 0.0),
        outer: OuterState | None = None,
        configurations: Configurations | None = None,
    ) -> None:
        self.run_id, self.config = run_id, config
        self._configurations = configurations
        self.approved = asyncio.Event()  # set: the configuration that waited has its approvals, and the next start serves it
        self.members, self.clock, self.feed = resources.members, resources.clock, resources.feed
        self.attendances = Attendances(config.membership, resources.feed, resources.clock.monotonic, self._phase_of)
        self.founding = Founding(
            config,
            resources.store,
            resources.background,
            self.attendances,
            resources.feed,
            resources.clock.monotonic,
            self._show_change,
        )
        self.schemas = Schemas(config, resources.background, self.attendances, lambda: self._schema or self._builtin)
        self.recent_rounds: deque[RoundReport] = deque(maxlen=KEPT_ROUNDS)
        self.history = History(lambda: self._rounds.machine.tokens if self._rounds is not None else 0)
        self.consents: dict[str, str] = {}  # by peer, of this start: the digest of the policy.toml that its site consents under
        self._saving_cosigned = False
        self.looked_at = -math.inf  # when somebody asked last how the run stands, in monotonic seconds
        self.warnings: Sequence[str] = ()  # of its own certificates and its clock, for the status
        self._resources = resources
        self._given = outer
        self._builtin = builtin_schema(config, aggregator) if outer is None else outer.schema
        self.first_round_id, self._awaited = first_round_id, awaited
        self._rounds: RoundRunner | None = None
        self._advice = PaceAdvice(config)
        self._keys = resources.members.keys  # as they were when it was looked at last
        self._told_ahead: set[str] = set()  # members whose outer step was above the run's, as the log has said
        self._told_misfits: set[str] = set()  # members whose software is another one than this, as the log has said
        self._held_for = ""  # why this process opens no rounds, though nobody ordered it
        self._held_up = ""  # as the views say it: counted once per change, not once per rank
        self._sequence = 0
        self.feed.subscribe(self.history.on_event)
        self.feed.subscribe(self._on_event)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Return the settings, as a status has them; they do not change while the run is served."""
        return settings_of(self.config)

    @property
    def log_key(self) -> str:
        """The public key of the run's audit log, as text; '': it keeps none."""
        audit = self._resources.store.audit
        return audit.key if audit is not None else ""

    @property
    def audit(self) -> str:
        """How its audit log stands, in words; '': it keeps none."""
        audit = self._resources.store.audit
        return audit.standing if audit is not None else ""

    # ---- life ----------------------------------------------------------------------------------------------------------

    def begin_with(self, history: History, rounds: Sequence[RoundReport]) -> None:
        """Show what earlier starts have done, too. Before `start`."""
        self.history.begin_with(history)
        self.recent_rounds.extend(rounds)

    async def start(self) -> None:
        """Recover the outer state, if there is any, and begin to watch the clock.

        Raises StorageError, and ConfigError when it is below an outer step that was committed.
        """
        background = self._resources.background
        recovered = self._given
        if recovered is None:
            recovered = await background.in_worker(self._resources.store.recover, self._check_and_keep)
        if (budget := self.privacy) is not None:
            budget.begin()
            _log.info("privacy: %s; %d more fit", budget.text, budget.left)
        if self._given is None and recovered is not None and (kept := self._resources.store.kept) is not None:
            await background.in_worker(kept.committed, recovered.outer_step)
        if recovered is not None:
            self._adopt(recovered)
        background.spawn(self._watch_the_clock())

    def _say_noise(self, schema: Schema) -> None:
        """Log how long the noise is. Raises ConfigError where it would drown everything."""
        line, much = noise_line(self.config, schema)
        _log.log(logging.WARNING if much else logging.INFO, "privacy: %s", line)

    def _check_and_keep(self, recovered: OuterState | None) -> None:
        """Hold the settings to what is recovered, and keep them. In the worker thread, before anything is written.

        So settings with which the run cannot go on leave nothing behind, and those that the log, the ledger or a checkpoint
        have are in run.toml. Raises ConfigError, also where noise would drown everything; StorageError.
        """
        resources, schema = self._resources, self._builtin
        if recovered is not None:
            _log.info("recovered outer step %d, digest %s", recovered.outer_step, recovered.digest[:12])
            schema = recovered.schema
            resources.fits(schema)
        if (budget := self.privacy) is not None:
            if recovered is not None:
                budget.check(recovered.outer_step)
            if schema is not None:
                self._say_noise(schema)
        if resources.mark is not None:
            resources.mark.check(Mark(recovered.outer_step, recovered.digest) if recovered is not None else None)
        resources.keep_settings()

    @property
    def privacy(self) -> PrivacyBudget | None:
        """The budget, with privacy.level = "organisation"."""
        return self._resources.privacy

    async def close(self, *, checkpoint: bool = True) -> None:
        """Stop watching the clock, write a checkpoint of what is committed, close the files.

        No checkpoint after a bug: what is in memory may be behind the journal.
        """
        resources = self._resources
        await resources.background.stop()
        resources.store.round_opened(0)  # the open one will not be committed
        if checkpoint and self._rounds is not None and resources.background.failure is None:
            await self._rounds.checkpoint()
        resources.store.close()
        resources.uploads.close()
        if resources.privacy is not None:
            resources.privacy.close()

    async def _watch_the_clock(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.end_replaced()
            self.attendances.end_expired(self.clock.unix())
            self.attendances.tick()
            if self._rounds is None:
                self.founding.tick()
            else:
                self._rounds.published.tick()
            self._tell_rounds(events.Tick())

    def _adopt(self, outer: OuterState) -> None:
        """Take the run's parameters: rounds may begin, as far as the operator's orders of an earlier process let them."""
        resources = self._resources
        self._check_promised()
        published = PublishedState(outer, resources.store, resources.background, self.clock.monotonic)
        self._rounds = RoundRunner(
            outer,
            self.config,
            resources,
            published,
            first_round_id=self.first_round_id,
            awaited=self._awaited,
            run_id=self.run_id,
        )
        if resources.orders.paused or self._held_for:
            self._rounds.feed(events.Pause())
        if resources.orders.draining:
            self._rounds.feed(events.Drain())
        self._rounds.feed(events.Tick())

    def _check_promised(self) -> None:
        """Drop what a region brought that no commit has, if the region was evicted or has another key since.

        Where its file does not say which one brought it, that was the run's only region; with several it is dropped.
        """
        injections = self._resources.store.injections
        if (promised := injections.pending) is None:
            return
        regions = [Sender(one.peer_id, one.key) for one in self.members.all() if one.role == "region"]
        sender = promised.sender or (regions[0] if len(regions) == 1 else None)
        if sender is not None and self.members.still_counts(sender.name, sender.key):
            injections.pending = Promised(promised.injection, sender)
            return
        injections.drop("the region that brought it was evicted or has another key, or nobody knows which one it was")

    # ---- what follows from an event ------------------------------------------------------------------------------------

    def _on_event(self, event: RunEvent, unix: float) -> None:
        match event:
            case MemberChanged(peer_id, _, reason, live=False) | RankLost(peer_id, reason):
                self._tell_rounds(events.MemberLost(peer_id, reason))
            case StepCommitted(commit, missing):
                self.attendances.count(commit, missing)
            case RoundReport():
                self.recent_rounds.append(replace(event, t=unix))
            case MemberEnrolled():
                self.end_replaced()
                self._show_change()
            case RoundChanged() | RunEnded() | OrderGiven():
                self._show_change()

    def _phase_of(self, peer_id: str) -> PeerPhase | None:
        return self._rounds.machine.peer_phase(peer_id) if self._rounds is not None else None

    def _tell_rounds(self, event: events.Event) -> None:
        if self._rounds is not None:
            self._rounds.feed(event)

    def _show_change(self) -> None:
        """Send every rank the run as it stands now."""
        if self._rounds is not None:
            measured_s = self._rounds.machine.deadlines.measured_step_s
            self._advice.update(self.attendances.membership.members.values(), measured_s)
        reason = self.held_up()
        if reason and reason not in (self._held_up, self._held_for, _PAUSED):
            self.feed.publish(Advised("", reason))
        self._held_up = reason
        self._sequence += 1
        self.attendances.wake()

    # ---- attendance ----------------------------------------------------------------------------------------------------

    def attend(self, peer_id: str, schema: Schema, rank: int, ranks: int, expires: Callable[[], float]) -> Attendance:
        """Take a rank's stream that opened. Raises EvictedError, and RefusedError with a reason for the peer's operator.

        expires: says until when its connection counts, in seconds since 1970.
        """
        if self._rounds is not None and schema.schema_hash != self._rounds.outer.schema.schema_hash:
            raise RefusedError("another model: its schema_hash differs")  # the run was founded while the schema was learned
        self.end_replaced()  # at a further aggregator this call may be the first with another key
        if expires() == 0.0:  # it was authorized before that, and took its time to say Hello
            raise RefusedError(_replaced(peer_id))
        attendance = self.attendances.open(peer_id, schema, rank, ranks, expires)
        if rank == 0 and self._rounds is None and self.may_take_part(peer_id):
            self.founding.attended(peer_id)
        self._show_change()
        return attendance

    def may_take_part(self, peer_id: str) -> bool:
        """Return whether a peer counts: its site has consented, where the run asks for that."""
        return not self.config.membership.consent or peer_id in self.consents

    def check_consented(self, peer_id: str) -> None:
        """Raise TransportError unless `may_take_part`: it comes on another stream, so the consent may be on its way."""
        if not self.may_take_part(peer_id):
            raise TransportError(f"{peer_id} has not said yet that its site consents to the configuration (membership.consent)")

    def lacks_consent(self, peer_id: str) -> None:
        """A peer attends, and does not say that its site consents: what it said before counts no more."""
        self.consents.pop(peer_id, None)

    def consents_awaited(self) -> list[str]:
        """Return the members that would train and whose sites have not consented, where the run asks for that."""
        if not self.config.membership.consent:
            return []
        peers = {one.peer_id for one in self.members.all() if one.role == "peer" and one.evicted is None}
        return sorted(peers - self.consents.keys())

    def not_understood(self, peer_id: str, fault: str) -> None:
        """Warn, once per member, of a first message that is not understood; the member goes on trying."""
        if peer_id not in self._told_misfits:
            self._told_misfits.add(peer_id)
            self.feed.publish(Advised(peer_id, one_line(fault)))

    def consented(self, peer_id: str, consent: Consent) -> None:
        """Take a site's consent to the configuration. Raises RemoteProtocolError unless it is one."""
        check_consent(consent, self.run_id, peer_id, config_digest(self.config))
        if self.consents.get(peer_id) == consent.policy_digest:
            return
        self.consents[peer_id] = consent.policy_digest
        self.feed.publish(Consented(peer_id, consent.policy_digest))
        if self.config.membership.consent:
            if self._rounds is None and self.attendances.get(peer_id) is not None:
                self.founding.attended(peer_id)
            self._show_change()
        if (entries := self._resources.store.entries) is not None:
            self._resources.background.spawn(self._log_consent(entries, peer_id, consent))

    async def _log_consent(self, entries: Entries, peer_id: str, consent: Consent) -> None:
        try:
            await self._resources.background.in_worker(entries.consent, peer_id, consent)
        except StorageError as error:
            _log.error("%s; it is tried again before the next commit", error)

    # ---- the configuration ---------------------------------------------------------------------------------------------

    def told(self, known: int) -> tuple[int, tuple[ConfigChange, ...]]:
        """Return the configuration's number, 0 where nobody counts, and the changes since the one that a peer knows."""
        if (configurations := self._configurations) is None:
            return 0, ()
        return configurations.in_force.number, configurations.since(known)

    @property
    def governance(self) -> str:
        """Say for whose approvals a changed configuration waits; '': none does."""
        return self._configurations.text(self.members.evicted) if self._configurations is not None else ""

    def proposal(self, known: int) -> Proposal:
        """Return what waits for approvals. known: as for `told`."""
        if self._configurations is None:
            return Proposal(Configuration(1, self.config.to_json()))
        return self._configurations.proposal(known)

    async def approve(self, peer_id: str, public_key: bytes, approval: Approval) -> str:
        """Take an approval; return in words what is still waited for. It is in the audit log when this returns.

        public_key: of the caller's certificate, DER. Raises RefusedError for who is no approver, StaleError where another
        configuration waits or none, RemoteProtocolError for an approval that does not count, StorageError.
        """
        configurations, audit = self._configurations, self._resources.store.audit
        if configurations is None or audit is None:
            raise StaleError("no configuration waits for approvals: this run has no governance.approvers")
        if approval_key(approval) != public_key:
            raise RemoteProtocolError("an approval is signed with another key than the certificate's")
        if configurations.proposed is not None and peer_id not in (names := governance_of(configurations.in_force.text).names):
            raise RefusedError(f"{peer_id} is no approver of this run (governance.approvers: {', '.join(names)})")
        name = configurations.check(approval)
        await self._resources.background.in_worker(audit.approve, name, approval)
        if name not in configurations.approvals:
            configurations.approvals[name] = approval
            self.feed.publish(Approved(name, configurations.text(self.members.evicted)))
            if not configurations.missing:
                self.approved.set()
            self._show_change()
        return configurations.text(self.members.evicted)

    def cosigned(self, peer_id: str, public_key: bytes, cosigned: Cosignature) -> None:
        """Take a head of the audit log that a member vouches for. Raises RemoteProtocolError where it has not signed it.

        public_key: of the member's certificate, DER.
        """
        audit = self._resources.store.audit
        if audit is None or not self.config.audit.cosign or self._rounds is None:
            return
        if audit.cosigned(peer_id, public_key, cosigned) and not self._saving_cosigned:
            self._saving_cosigned = True
            self._resources.background.spawn(self._save_cosigned(audit.cosignatures))

    async def _save_cosigned(self, cosignatures: Cosignatures) -> None:
        """Write what is new, and what becomes new meanwhile."""
        try:
            while (notes := cosignatures.unsaved()) is not None:
                await self._resources.background.in_worker(cosignatures.write, notes)
        except StorageError as error:
            _log.error("%s; it is tried again with the next cosignature", error)
        finally:
            self._saving_cosigned = False

    def leave(self, attendance: Attendance, reason: str, *, polite: bool) -> None:
        """Take the end of a rank's stream. See `Attendances.close`."""
        if self.attendances.close(attendance, reason, polite=polite):
            if attendance.rank == 0 and self._rounds is None:
                self.founding.left(attendance.peer_id)
            self._show_change()

    def heartbeat(self, attendance: Attendance, heartbeat: Heartbeat) -> None:
        """Take a rank's report. Raises RefusedError when its stream was replaced.

        Only rank 0 speaks for the replica; what the others report keeps their connection alive, no more.
        """
        if attendance.rank != 0:
            return
        peer_id = attendance.peer_id
        self.attendances.heartbeat(attendance, heartbeat)
        outer_step = self._rounds.published.outer_step if self._rounds is not None else 0
        if warning := self._advice.new_warning(peer_id, heartbeat.step_s, outer_step):
            self.feed.publish(Advised(peer_id, warning))
        if self._rounds is None:
            return
        self._compare_steps(peer_id, heartbeat.outer_step)
        if heartbeat.outer_step == self._rounds.published.outer_step:
            self.attendances.check_digest(attendance, heartbeat, self._rounds.published.digest)
        if heartbeat.state is not PeerState.STARTING and not attendance.resync:
            self._rounds.feed(events.MemberReady(peer_id, heartbeat.outer_step, heartbeat.step_s))

    def _compare_steps(self, peer_id: str, outer_step: int) -> None:
        """Warn, once per member, of an outer step above the run's: no commit here led to it."""
        if self._rounds is not None and outer_step > self._rounds.published.outer_step and peer_id not in self._told_ahead:
            self._told_ahead.add(peer_id)
            self.feed.publish(Advised(peer_id, _ahead(outer_step, self._rounds.published.outer_step)))

    def rolled_back(self) -> str:
        """Return what a live member reports from beyond the last commit, or ''."""
        if self._rounds is None:
            return ""
        live = [one for one in self.attendances.membership.members.values() if one.live and one.heartbeat is not None]
        steps = {one.peer_id: one.heartbeat.outer_step for one in live if one.heartbeat is not None}
        peer_id = max(steps, key=lambda each: steps[each], default="")
        own = self._rounds.published.outer_step
        return f"{peer_id}: {_ahead(steps[peer_id], own)}" if peer_id and steps[peer_id] > own else ""

    def view(self, attendance: Attendance) -> View:
        """Return the run as this rank is to see it."""
        if self._rounds is None:
            return founding_view(attendance, self.founding.founder, self._sequence, self._held_up, self.peers_awaited())
        member = self.attendances.membership.members.get(attendance.peer_id)
        streams = max(1, len(self.attendances.members())) * self.attendances.ranks(attendance.peer_id)
        ahead_bytes = self._resources.uploads.share(streams)
        inner_steps = self._advice.inner_steps(member)
        awaited = self.peers_awaited()
        return founded_view(attendance, self._rounds, self._sequence, self._held_up, awaited, inner_steps, ahead_bytes)

    def peers_awaited(self) -> str:
        """Return how many peers the first round still waits for, in words, or '': by who attends, ready or not."""
        wanted = self.config.rounds.start_peers
        if self._rounds is not None:
            machine = self._rounds.machine
            if machine.phase is not Phase.GATHERING or machine.enough < wanted or self._rounds.published.outer_step > 0:
                return ""
        missing = wanted - sum(map(self.may_take_part, self.attendances.members()))
        if missing <= 0 or wanted < 2:
            return ""
        return f"{missing} of {wanted} peers (rounds.start_peers = {wanted})"

    def held_up(self) -> str:
        """Return why no round comes, or ''."""
        if self._rounds is not None:  # before, peers are still to come
            if self._rounds.machine.ended and self.finished:
                return self._rounds.machine.ended
            joined = [one.peer_id for one in self.members.all() if one.role == "peer" and one.evicted is None]
            reason = impossible(self.config.rounds, self._rounds.published.outer_step, len(joined))
            reason = reason or unanchored(self.config.robust, joined)
            if reason and self.members.knows_all:  # elsewhere the status says what is waited for
                return reason
            if reason := self._rounds.machine.held_back:
                return reason
        return _PAUSED if self._resources.orders.paused else self._held_for

    # ---- the operator's orders -------------------------------------------------------------------------------------------

    def evict(self, peer_id: str, reason: str) -> None:
        """Shut this identity out for good, with all its ranks, also one that is only invited.

        Raises RefusedError for an unknown one, StorageError.
        """
        invited = self._resources.invited(peer_id) if self.members.get(peer_id) is None else ""
        self.members.evict(peer_id, reason, invited)
        self._check_promised()
        if self._rounds is not None:
            # First: its loss alone could close the round with what it delivered.
            self._rounds.withdraw(peer_id, "was evicted", f"evicted: {reason}")
        self.attendances.evict(peer_id, reason)
        self.feed.publish(OrderGiven("evicted", peer_id, reason))

    def end_replaced(self) -> None:
        """Shut out the machines of members that have another key now: as an eviction does, but the member itself stays.

        It is looked at with each tick; call it as soon as keys may have changed.
        """
        before, self._keys = self._keys, self.members.keys
        if self._keys is before:
            return
        self._check_promised()
        for peer_id in [each for each, key in before.items() if self._keys.get(each, key) != key]:
            reason = _replaced(peer_id)
            if self._rounds is not None:
                self._rounds.withdraw(peer_id, "has another key", reason)
            self.consents.pop(peer_id, None)
            self.attendances.end_replaced(peer_id, reason)
            self.feed.publish(MachineReplaced(peer_id, reason))

    def pause(self) -> None:
        """Open no rounds until `resume`, also in a later process. Raises StorageError; then nothing is paused."""
        self._resources.orders.pause()
        self._tell_rounds(events.Pause())
        self.feed.publish(OrderGiven("paused"))

    def hold(self, reason: str) -> None:
        """Open no rounds in this process for a reason, as the peers are told. Empty: open them again, unless paused."""
        if reason == self._held_for:
            return
        self._held_for = reason
        if reason or not self._resources.orders.paused:
            self._tell_rounds(events.Pause() if reason else events.Resume())
        self._show_change()

    def resume(self) -> None:
        """Open rounds again, also after `drain`. Raises StorageError; then nothing is resumed."""
        self._resources.orders.resume()
        self._tell_rounds(events.Resume())
        self.feed.publish(OrderGiven("resumed"))

    def drain(self, outer_step: int = 0) -> int:
        """Finish the run at an outer step; 0: with the open round. Return the one at which it will end, or has ended.

        outer_step: of this process only: once the coordinator is started again, the run has finished where it is.

        Raises RefusedError before the founding, StorageError.
        """
        if self._rounds is None:
            raise RefusedError("the run has no parameters yet, so there is nothing to drain; stop the coordinator")
        self._resources.orders.drain()
        self._rounds.feed(events.Drain(outer_step))
        self.feed.publish(OrderGiven("drained"))
        machine = self._rounds.machine
        return machine.outer_step if machine.last_step is None else machine.last_step

    # ---- founding ------------------------------------------------------------------------------------------------------

    def receive_founding(self, peer_id: str, header: FoundHeader) -> AbstractContextManager[Transfer]:
        """Begin to take the founder's parameters; see `Founding.transfer`. Raises StaleError when the run has parameters."""
        self.check_run_id(header.run_id)
        if self._rounds is not None:
            raise StaleError("the run has parameters already; take a snapshot")
        return self.founding.transfer(peer_id, header)

    async def found(self, transfer: Transfer, theta: Sequence[Tensor], claimed_digest: str) -> None:
        """Take the founder's parameters as outer step 0. Raises RemoteProtocolError, StorageError.

        Once they are accepted, the run is founded also if the caller goes away: what is on disk and what is published are one.
        """
        outer = await self.founding.accept(transfer, theta, claimed_digest)
        founded = asyncio.get_running_loop().create_future()
        self._resources.background.spawn(self._found(transfer.turn.peer_id, outer, founded))
        await founded

    async def _found(self, peer_id: str, outer: OuterState, founded: asyncio.Future[None]) -> None:
        try:
            await self.founding.write(outer)
        except StorageError as error:
            _log.error("the run is not founded: %s", error)
            if not founded.done():
                founded.set_exception(error)
            return
        differences = await self.schemas.differences(outer.schema, self.attendances.other_models(outer.schema))
        self.feed.publish(RunFounded(peer_id, outer.schema.numel, len(outer.schema.fragments)))
        if self._builtin is None and self.privacy is not None:
            self._say_noise(outer.schema)
        self._adopt(outer)
        self.attendances.expel_other_models(outer.schema, differences)
        self._show_change()
        if not founded.done():
            founded.set_result(None)

    # ---- what the services ask -------------------------------------------------------------------------------------------

    @property
    def _schema(self) -> Schema | None:
        return self._rounds.outer.schema if self._rounds is not None else None

    @property
    def draining(self) -> bool:
        """Whether the run was drained, and its open round is still to come to its end."""
        return self._rounds is not None and self._rounds.machine.draining and not self.finished

    @property
    def finished(self) -> bool:
        """Whether the last outer step or token is merged, or the run was drained."""
        return self._rounds is not None and self._rounds.machine.phase is Phase.FINISHED

    def not_left(self) -> list[str]:
        """Return the members that train, not evicted, that have not said goodbye to this process."""
        attended = self.attendances.membership.members
        known = [one.peer_id for one in self.members.all() if one.role in ("peer", "region") and one.evicted is None]
        return [peer_id for peer_id in known if peer_id not in attended or attended[peer_id].state is not MemberState.LEFT]

    @property
    def founded(self) -> bool:
        """Whether the run has parameters."""
        return self._rounds is not None

    @property
    def rounds(self) -> RoundRunner:
        """The rounds. Raises StaleError before the founding."""
        if self._rounds is None:
            raise StaleError("the run has no parameters yet")
        return self._rounds

    def check_run_id(self, run_id: str) -> None:
        """Raise RefusedError for another run."""
        if run_id != self.run_id:
            raise RefusedError(f"this is run {self.run_id}, not {run_id}")


def _replaced(peer_id: str) -> str:
    return f"the certificate of {peer_id} was replaced by a newer one"


def _ahead(outer_step: int, own: int) -> str:
    return f"it reports outer step {outer_step}, the run is at {own}; were commits lost, or an old copy of the folder restored?"
