"""`edit.Collective` over gRPC: one rank's connection to one aggregator. A peer of several ranks has one at each rank.

It puts the parts together (session, control stream, data calls, uplink, downlink, the ranks' agreement) and says when the main
thread waits. The main thread calls; the loop's thread does the I/O.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import grpc
from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import (
    ConfigError,
    EditError,
    EvictedError,
    LocalProtocolError,
    OutdatedError,
    RefusedError,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from edit.fragments.digest import digest
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema
from edit.fragments.shards import Shard
from edit.records import (
    Aborted,
    Commit,
    Committed,
    Contribution,
    DescribedSnapshot,
    Evicted,
    Finished,
    FragmentCommit,
    Lacking,
    Lacks,
    NeedsSnapshot,
    Outcome,
    PeerVerdict,
    Progress,
    Snapshot,
    Verdict,
)
from edit.replica.ranks import ALONE, Ranks
from edit.trust.checkpoints import Cosigner
from edit.trust.mask_plan import FragmentPlan
from edit.trust.signatures import Signer, key_hash
from editpb.earlier_keys import earlier_keys
from editpb.identity import Identity
from editpb.messages import ContributionHeader, Expel, Heartbeat, Hello, PeerState, RunPhase, View
from editpb.receipts import Mine, SeenMasks
from editpb.signed_contributions import ContributionSigner, config_digest, signs
from peers.carriers.hub.channels import Channels, first_answer
from peers.carriers.hub.control_stream import Attendance, ConfigParser, Report, ask_welcome, configuration_of
from peers.carriers.hub.data_calls import DataCalls, once
from peers.carriers.hub.downlink import Downlink
from peers.carriers.hub.masking import MaskingCalls, MaskingSession, ReadyRound, masked
from peers.carriers.hub.receipts import Receipts
from peers.carriers.hub.session import HAS_PARAMETERS, NEVER, Decision, Session
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.hub.uplink import ATTEMPTS, Sign, Stage, Uplink, as_it_is
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement
from peers.carriers.run_connection import Origin, Traffic

__all__ = ["HubCollective", "Siblings", "ask_configuration", "read_configuration"]

SOFTWARE = "edit-localsgd 0.1.0"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderDecision:
    """What rank 0 says of an outer step, at all ranks."""

    decision: Decision
    reason: str
    round_id: int = 0  # the round that its contribution names, or 0
    carried: bool = False  # a contribution that the commit does not have may be part of a later one
    inner_steps: int = 0  # until the next contribution; 0: as before
    opened: bool = False  # this peer helped to open a masked sum with its contribution


_HIDDEN: Mapping[str, Any] = MappingProxyType(
    {"loss": math.nan, "tokens_per_s": 0.0, "step_s": 0.0, "device": "", "metrics": {}}
)  # what a report has of `Progress` where it says nothing


class Siblings:
    """What the connections of one peer share: one parsed configuration, one snapshot server, one start, and where they go.

    They begin to train together: no aggregator waits for this peer while it still reads the snapshots of the others.

    Args:
        connections: how many there are.
        parser: of the configuration.
        server: of this peer's snapshots; heartbeats tell of it.
        further: to the further aggregators, in their order.
    """

    def __init__(
        self,
        connections: int = 1,
        parser: ConfigParser | None = None,
        server: SnapshotServer | None = None,
        further: Sequence[Channels] = (),
    ) -> None:
        self.parser = parser or ConfigParser()
        self.server = server
        self._further = further
        self._addresses: tuple[str, ...] | None = None  # of them, by the coordinator's last configuration
        self._connections = connections
        self._joined: list[HubCollective] = []

    def joined(self, connection: HubCollective) -> Sequence[HubCollective]:
        """Note that `connection` has joined; return all of them once the last has, else none."""
        self._joined.append(connection)
        return tuple(self._joined) if len(self._joined) == self._connections else ()

    def configured(self, config: RunConfig) -> None:
        """Go to the further aggregators where the coordinator's configuration says that they are. On the loop's thread."""
        if config.swarm is not None:
            return  # its parts have owners, which each host is told of
        before, self._addresses = self._addresses, config.aggregators.addresses
        if self._addresses == before:
            return
        if len(self._addresses) != len(self._further):
            _log.warning(
                "the run has %d aggregators now, this peer goes on with %d; start it again to take part with all",
                config.aggregators.count,
                1 + len(self._further),
            )
            return
        for number, (channels, address) in enumerate(zip(self._further, self._addresses, strict=True), start=1):
            if channels.endpoints != (address,):
                _log.info("aggregator %d is at %s now, not at %s", number, address, channels.endpoint)
                channels.move(address)


class Follower(Protocol):
    """Is told at rank 0 what this peer sends, and which updates it takes. On the loop's thread."""

    def signed(self, header: ContributionHeader) -> ContributionHeader:
        """A contribution is signed, and may be sent. Returns the header."""
        ...

    def delivered(self, header: ContributionHeader) -> None:
        """The other side has said that it has all of this shard."""
        ...

    def took(self, commit: Commit) -> None:
        """An update is here."""
        ...


class HubCollective:
    """One rank's side of a run at one aggregator; a `peers.carriers.run_connection.AggregatorConnection`.

    Use it inside an open `IoThread`, and call `close` before that ends. All ranks of a replica make the same calls in the same
    order, but for `report`, `traffic`, `connected`, `interrupt` and `close`. What rank 0 hears decides; what every rank must
    have is taken by all or by none.

    Args:
        io: the I/O thread.
        channels: to the aggregator, and to other members.
        identity: this peer's.
        ranks: of this replica.
        siblings: what this peer's connections to all aggregators share; None: this is the only one.
        stage: applied to each contribution once its round is known.
        site: this peer's.
        follower: at rank 0; None: nobody follows.
        draw: random numbers in [0, 1).
        aggregator: its number in the run; 0: the coordinator.
    """

    def __init__(
        self,
        io: IoThread,
        channels: Channels,
        identity: Identity,
        *,
        ranks: Ranks = ALONE,
        siblings: Siblings | None = None,
        stage: Stage = as_it_is,
        site: Site = NOWHERE,
        follower: Follower | None = None,
        draw: Callable[[], float] = random.random,
        aggregator: int = 0,
    ) -> None:
        self._io = io
        self._channels = channels
        self._aggregator = aggregator
        self._identity = identity
        self._ranks = ranks
        self._siblings = siblings or Siblings()
        self._stage, self._site, self._follower = stage, site, follower
        self._hidden = {name: _HIDDEN[name] for name in site.hide}
        # The main thread's.
        self._agreement = RankAgreement(io, ranks, lambda: io.read(self._trouble))
        self._prefetched: concurrent.futures.Future[tuple[Schema, Snapshot]] | None = None  # the loop only completes it
        self._fragments: Sequence[FragmentSpec] = ()  # of the model, since `join`
        self._behind = False  # whether `join` has let this peer begin at an older outer step than the run's
        self._round: ReadyRound | None = None  # with masks: the one that the next contribution is for
        # Changed on the loop's thread, in `IoThread.change`; the main thread reads it under the lock.
        self._masking: MaskingSession | None = None  # at rank 0 of a run with masks, since `join`
        self._session = Session(draw, time.monotonic(), follows=channels.moves)
        self._receipts: Receipts | None = None  # at rank 0 of a run with an audit log, since `join`
        self._links: tuple[Uplink, Downlink] | None = None  # made once, by `join`; so the main thread may look without the lock
        # The loop's thread's.
        self._report = Report(Heartbeat(state=PeerState.STARTING), Traffic(), self._siblings.server)
        self._data = DataCalls(channels, identity.run_id, self._report.traffic, draw)
        self._attendance: Attendance | None = None  # made by `join`, before the loop looks

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._identity.peer_id

    @property
    def ranks(self) -> int:
        """For how many ranks of this replica the connection was made."""
        return self._ranks.size

    # ---- entering --------------------------------------------------------------------------------------------------------

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        """See `Collective.join`. Returns when the first round is open (all peers start together) or the run is under way.

        Once for each collective. Raises ConfigError when the ranks of this replica have different models.
        """
        if self._attendance is not None:
            raise LocalProtocolError("one training per connection: leave peers.connect, and connect again for another")
        self._ranks.same("the model (its schema)", schema.schema_hash)
        self._fragments = schema.fragments
        attendance = self._attendance = Attendance(
            channels=self._channels,
            session=self._session,
            io=self._io,
            hello=_hello(self._identity, self._ranks, schema.schema_hash),
            schema=schema,
            report=self._report,
            parser=self._siblings.parser,
            changed=self._advance,
            configured=self._configured,
        )
        self._io.spawn(attendance.run())
        self._found_or_wait(schema, found)
        config, _ = self._agreement.decide(lambda: attendance.welcome)
        self._agreement.on_leader(partial(self._open_receipts, config, schema.schema_hash))
        held = [Shard(each) for each in schema.fragments] if shards is None else shards
        self._io.change(partial(self._configure, config, schema, held, self._ranks.lead(lambda: time.time_ns() // 10**6)))
        begins_at: int | None = None

        def ask(run: DescribedSnapshot) -> Lacking:
            nonlocal begins_at
            lacking = lacks(run) if lacks is not None else Lacking(range(len(run.hashes)))
            begins_at = lacking.begins_at
            return lacking

        if (snapshot := self._take_prefetched(schema)) is None:
            snapshot = self._first_snapshot(ask)
        elif (receipts := self._receipts) is not None:
            self._io.change(partial(receipts.at, snapshot.outer_step, snapshot.digest))
        starting = Heartbeat(state=PeerState.STARTING, outer_step=snapshot.outer_step, digest=snapshot.digest)
        if begins_at is not None:
            run_step = max(snapshot.outer_step, snapshot.run_outer_step)
            _log.info("beginning at outer step %d, and the updates to %d", begins_at, run_step)
            starting = dataclasses.replace(starting, outer_step=begins_at, digest="")
        self._io.post(partial(self._say, starting))
        self._behind = begins_at is not None
        together = self._siblings.joined(self)
        waits = any(one._behind for one in together)
        for one in together:  # where no round was open yet, none will be before this peer is ready
            if not one._behind and not (waits and one._under_way()):
                one._io.post(partial(one._set_state, PeerState.TRAINING))
        for one in together:
            one._wait_until_under_way()
        return snapshot

    def _under_way(self) -> bool:
        return self._io.read(lambda: self._session.under_way)

    def _wait_until_under_way(self) -> None:
        """Wait until a round is or was open; rank 0 logs for whom, each time that changes."""
        told = ""
        while self._agreement.poll(lambda: self._session.under_way or None) is None:
            view = self._io.read(lambda: self._session.view)
            if self._ranks.leads and view is not None and view.waiting_for != told:
                told = view.waiting_for
                if told:
                    _log.info("waiting for %s", told)

    def prefetch(self) -> None:
        """Begin to fetch the snapshot that `join` will return, from a run that has parameters, while the model is built.

        A peer of one rank holds all of it; what the ranks of a larger one hold only their model can tell, so they do nothing.
        What fails is fetched again when it is needed.
        """
        if self._ranks.size == 1:
            self._prefetched = self._io.begin(self._fetch_ahead())

    def _found_or_wait(self, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> None:
        """Wait until the run has parameters. Send those that `found` gives each time this peer is newly asked to found it."""
        answered = NEVER
        while (asked := self._agreement.decide(partial(self._session.founding, answered))) != HAS_PARAMETERS:
            theta = list(found())
            send = partial(self._data.found, schema, theta)
            try:
                self._agreement.on_leader(lambda: send(digest(theta), self._online))  # noqa: B023
                answered = asked.end_of_connection()
            except (OutdatedError, TransportError, RefusedError) as error:
                _log.info("founding: %s", error)  # a view will tell who founds the run now
                answered = asked

    def _configure(self, config: RunConfig, schema: Schema, shards: Sequence[Shard], started_ms: int) -> None:
        """Make the links (loop's thread). started_ms: of rank 0, so that a later life's attempts have greater numbers."""
        self._session.configure(config.membership.heartbeat_s, config.rounds.max_staleness)
        used = config.secagg.enabled or config.audit.enabled
        if self._site.masks is not None and self._site.masks.members is not None and not used:
            raise ConfigError(
                "--members: has no effect in a run that neither masks (secagg.enabled) nor keeps an audit log (audit.enabled); "
                "leave it out"
            )
        if config.secagg.enabled and self._ranks.leads:
            self._masking = self._masked_rounds(config)
            self._due = partial(
                fragments_due, fragments=len(schema.fragments), groups=config.sync.groups, pattern=config.sync.pattern
            )
            self._follow_masks()  # there may be no other news of this round
        downlink = Downlink(
            self._io,
            self._data,
            self._agreement,
            schema,
            shards,
            config.sync,
            config.codec.downlink,
            wanted=self._online,
            attending=lambda: self._session.view is not None,
            receipts=self._receipts,
        )
        uplink = Uplink(
            self._io,
            self._session,
            self._data,
            self._identity,
            schema,
            rank=self._ranks.rank,
            attempt=started_ms * ATTEMPTS,
            stage=self._stage,
            sign=self._signer(config) if signs(config) else None,
            delivered=self._delivered,
            refused=downlink.compare_logs,
        )
        self._links = uplink, downlink

    def _configured(self, config: RunConfig) -> None:
        """Take the configuration of each Welcome, and what it says of the log (loop's thread)."""
        kept, welcome = self._site.configuration, self._session.welcome
        if self._receipts is not None and welcome is not None:
            try:
                self._receipts.check_key(welcome.log_key)
            except RefusedError as error:
                self._session.expelled(Expel(evicted=False, reason=str(error)))
        if self._aggregator != 0:
            return
        self._siblings.configured(config)
        if self._links is None or self._ranks.rank or kept is None or welcome is None:
            return  # `_open_receipts` notes the first one
        try:
            kept.keep(configuration_of(welcome))
        except StorageError as error:
            _log.warning("%s: its number is noted when this peer connects again", error)

    async def _open_receipts(self, config: RunConfig, schema_hash: str) -> None:
        """At rank 0 (loop's thread). Raises ConfigError, RefusedError, StorageError."""
        if (kept := self._site.configuration) is not None and self._session.welcome is not None:
            kept.keep(configuration_of(self._session.welcome))
        if not config.audit.enabled or self._site.receipts is None or not self._site.key:
            return
        assert self._session.welcome is not None
        members = self._site.masks.members if self._site.masks is not None else None
        earlier = {*map(key_hash, earlier_keys(self._site.receipts, self._identity)), *(members or {}).get(self.peer_id, ())}
        self._receipts = Receipts.open(
            self._site.receipts,
            self._session.welcome.log_key,
            self._identity.run_id,
            schema_hash,
            Mine(self.peer_id, Signer(self._site.key).public_key, earlier=frozenset(earlier)),
            self._refuse,
            members,
            Cosigner(self._site.key) if config.audit.cosign else None,
            aggregator=self._aggregator,
            masked=config.secagg.enabled,
            lazily=config.sync.mode == "forward",
            max_staleness=config.rounds.max_staleness,
            config_digest=config_digest(config),
        )
        self._report.cosigned = self._receipts.cosigned

    def _refuse(self, reason: str) -> None:
        """Loop's thread: this peer goes on no longer, and contributes nothing more."""
        self._io.change(lambda: self._session.expelled(Expel(evicted=False, reason=reason)))

    def _signer(self, config: RunConfig) -> Sign:
        if (receipts := self._receipts) is not None:
            sign = ContributionSigner(self._site.key, config, receipts.seen)
            return lambda header, data: receipts.signed(sign(header, data))
        plain = ContributionSigner(self._site.key, config)
        if (follower := self._follower) is not None:
            return lambda header, data: follower.signed(plain(header, data))
        return plain

    def _delivered(self, header: ContributionHeader) -> None:
        for one in (self._receipts, self._follower):
            if one is not None and not self._session.carries:
                one.delivered(header)

    def _masked_rounds(self, config: RunConfig) -> MaskingSession:
        if not self._site.key or self._site.masks is None:
            raise ConfigError("secagg.enabled: this peer has no key and no folder of its own, which masks need")
        return MaskingSession(
            self._io,
            MaskingCalls(self._channels, self._identity.run_id),
            self.peer_id,
            signer=Signer(self._site.key),
            run_id=self._identity.run_id,
            config_digest=config_digest(config),
            min_peers=config.secagg.min_peers,
            quorum=config.rounds.quorum,
            file=self._site.masks.revealed,
            members=self._site.masks.pinned,
            saw=self._saw_masks,
        )

    def _saw_masks(self, round_id: int, seen: SeenMasks) -> None:
        if self._receipts is not None:
            self._receipts.saw_masks(round_id, seen)

    def _advance(self) -> None:
        """Loop's thread, at each news: send what can be sent; fetch what will be asked for."""
        self._follow_masks()
        if self._links is not None:
            self._io.change(self._links[0].advance)
            self._fetch(*self._links)

    def _follow_masks(self) -> None:
        """Loop's thread: take part in the masked round that is open."""
        if self._masking is not None and (view := self._session.view) is not None:
            due = self._due(view.outer_step) if view.round_id else ()
            self._masking.follow(view.round_id, view.outer_step, due)

    def _fetch(self, uplink: Uplink, downlink: Downlink) -> None:
        """Fetch an update that will be asked for while training goes on.

        Where contributions do not outlive their rounds, that begins as soon as this rank's is on its way.
        """
        step = uplink.position
        if (sent := uplink.sent_to(step)) is None:
            return
        match self._session.decide(step, sent, time.monotonic())[0]:
            case Decision.COMMITTED:
                downlink.foresee(step + 1)
            case Decision.WAIT if self._channels.takes_itself:
                pass  # it comes to this peer's own host ahead of the commit
            case Decision.WAIT if sent.round_id and not self._session.carries and self._session.takes(sent.round_id):
                downlink.fetch_ahead(step + 1, sent.round_id)

    def _first_snapshot(self, lacks: Lacks) -> Snapshot:
        while True:
            try:
                return self._snapshot(lacks)
            except TransportError as error:
                _log.info("%s; waiting for the coordinator", error)
                self._agreement.decide(lambda: self._session.view)

    async def _fetch_ahead(self) -> tuple[Schema, Snapshot]:
        manifest = await self._data.describe(None, once)
        shards = [Shard(fragment) for fragment in manifest.schema.fragments]
        return manifest.schema, await self._data.snapshot(manifest, shards, once)

    def _take_prefetched(self, schema: Schema) -> Snapshot | None:
        """Return what `prefetch` has begun, once it is here; None: nothing was begun, or it came to nothing."""
        coming, self._prefetched = self._prefetched, None
        return None if coming is None else self._agreement.together(_arrived(coming, schema))

    # ---- the rounds ------------------------------------------------------------------------------------------------------

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`: queued, sent once a round for its outer step is open.

        The ranks do not agree on it: a rank that owns nothing of a fragment need not call it.
        With masks `plan` is called before, and it is masked for the round that this returned.
        """
        round_id = 0
        if contribution.norm is not None:
            contribution, round_id = self._masked(contribution)
        self._io.change(partial(self._send, *self._joined(), contribution, round_id))

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        """See `edit.worker.masked.PlansRounds.plan`."""
        self._joined()

        def look() -> tuple[ReadyRound | None] | None:
            assert self._masking is not None
            if (ready := self._masking.ready(outer_step)) is not None:
                return (ready,)
            if self._masking.trouble or self._session.decide(outer_step, None, time.monotonic())[0] is not Decision.WAIT:
                return (None,)
            return None

        (self._round,) = self._agreement.decide(look)
        if self._masking is not None and self._round is not None:
            self._io.change(partial(self._masking.taken, self._round))
        return self._round.plans if self._round is not None else None

    def _masked(self, contribution: Contribution) -> tuple[Contribution, int]:
        """Return a contribution with its masks on, and the round that they are of."""
        current, i = self._round, contribution.fragment_id
        plan = next((one for one in current.plans if one.fragment_id == i), None) if current is not None else None
        if current is None or plan is None or current.outer_step != contribution.outer_step:
            raise LocalProtocolError(f"fragment {i} is contributed to outer step {contribution.outer_step} without its plan")
        shard = Shard(self._fragments[i], contribution.boxes)
        payload = masked(current.masks, contribution.payload, shard, plan.bits)
        return dataclasses.replace(contribution, payload=payload), current.round_id

    def _send(self, uplink: Uplink, downlink: Downlink, contribution: Contribution, round_id: int) -> None:
        """Loop's thread. A caller that reports nothing itself is where it contributes, or no round would wait for it.

        round_id: the only one that it may go to; 0: any.
        """
        uplink.position = max(uplink.position, contribution.outer_step)
        uplink.add(contribution, round_id)
        uplink.advance()
        self._fetch(uplink, downlink)
        heartbeat = dataclasses.replace(self._report.heartbeat, state=PeerState.EXCHANGING)
        if uplink.position > heartbeat.outer_step:
            heartbeat = dataclasses.replace(heartbeat, outer_step=uplink.position, digest="")
        self._say(heartbeat)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`. None although block: in doubt, the control connection has been down for two heartbeats.

        What was never sent is not in doubt: cut off, it is withdrawn and Aborted. Raises RefusedError, Interrupted.
        """
        leader = LeaderDecision(Decision.EVICTED, "")
        uplink, _ = self._joined()
        self._io.post(lambda: self._io.change(partial(self._asked, uplink, outer_step)))
        try:
            leader = self._decision(outer_step, block)
            outcome = self._act(leader, outer_step)
        except EvictedError as error:
            outcome = Evicted(str(error))
        if outcome is not None:
            self._end_attempt(leader, outcome)
        return outcome

    @staticmethod
    def _asked(uplink: Uplink, outer_step: int) -> None:
        """Loop's thread. What was contributed is in no commit up to this outer step."""
        uplink.position = outer_step
        uplink.advance()

    def snapshot(self) -> Snapshot:
        """See `Collective.snapshot`. Raises TransportError also when what arrived was damaged again and again."""
        return self._snapshot()

    def _snapshot(self, lacks: Lacks | None = None) -> Snapshot:
        _, downlink = self._joined()
        try:
            snapshot = downlink.snapshot(lacks)
        except TransportError:
            self._agreement.pause(lambda: self._session.view)  # else a caller that asks again and again would do nothing else
            raise
        self._io.change(self._session.resynced)
        return snapshot

    def _decision(self, outer_step: int, block: bool) -> LeaderDecision:
        """Return rank 0's decision, at every rank. block: wait until it is another one than WAIT."""

        def look() -> LeaderDecision | None:
            leader = self._view_of(outer_step)
            return None if leader.decision is Decision.WAIT else leader

        self._share(outer_step)
        if block:
            while (leader := self._agreement.poll(look)) is None:
                self._share(outer_step)
        else:
            leader = self._agreement.ask(lambda: self._view_of(outer_step))
        if leader.decision is not Decision.CUT_OFF:
            return leader
        if self._agreement.on_leader(lambda: self._withdraw(outer_step)):
            return LeaderDecision(Decision.ABORTED, f"{leader.reason}; nothing was sent")
        if block:
            self._agreement.pause(lambda: self._session.view)  # as in `snapshot`
        return leader

    def _view_of(self, outer_step: int) -> LeaderDecision:
        """Rank 0's own view of the matter; under the lock."""
        session, (uplink, _) = self._session, self._joined()
        sent = uplink.sent_to(outer_step)
        decision, reason = session.decide(outer_step, sent, time.monotonic())
        inner_steps = session.view.inner_steps if session.view is not None else 0
        carried = session.carried_past(outer_step + 1, sent)
        opened = self._masking is not None and self._masking.opened(outer_step)
        return LeaderDecision(decision, reason, sent.round_id if sent is not None else 0, carried, inner_steps, opened)

    async def _withdraw(self, outer_step: int) -> bool:
        uplink, _ = self._joined()
        return self._io.change(lambda: uplink.withdraw(outer_step))

    def _share(self, outer_step: int) -> None:
        """Let all ranks name the same round, and know when the coordinator has refused the shard of one of them."""
        uplink, _ = self._joined()
        if self._ranks.size == 1 or not self._session.carries:
            return
        known = self._ranks.collect(self._io.read(lambda: (uplink.proposal(outer_step), uplink.sent)))
        refused = next((sent for _, sent in known if sent is not None and sent.refused_at is not None), None)

        def follow() -> None:
            uplink.follow(known[0][0], refused)
            uplink.advance()

        self._io.change(follow)

    def _act(self, leader: LeaderDecision, outer_step: int) -> Outcome | None:
        match leader.decision:
            case Decision.COMMITTED:
                return self._commit(leader, outer_step + 1)
            case Decision.ABORTED:
                return Aborted(leader.reason)
            case Decision.BEHIND:
                return NeedsSnapshot(leader.reason)
            case Decision.FINISHED:
                return Finished(outer_step)
            case Decision.EVICTED:
                return Evicted(leader.reason)
            case Decision.REFUSED:
                raise RefusedError(leader.reason)
        return None

    def _commit(self, leader: LeaderDecision, outer_step: int) -> Committed | NeedsSnapshot | None:
        """Return every rank's shards of the update that led to `outer_step`; None: a rank was cut off, so ask again."""
        _, downlink = self._joined()
        try:
            outcome = downlink.update(outer_step)
        except TransportError as error:
            _log.info("%s", error)
            return None
        except (OutdatedError, RemoteProtocolError) as error:
            return NeedsSnapshot(f"update {outer_step}: {error}")
        if (follower := self._follower) is not None:
            self._io.post(partial(follower.took, outcome.commit))
        carried = leader.carried and not outcome.commit.has(self.peer_id)
        if leader.opened and not outcome.commit.has(self.peer_id):
            _log.warning("outer step %d lacks a contribution whose masked sum was opened; it is dropped", outer_step)
            outcome = dataclasses.replace(outcome, commit=_dropped(outcome.commit, self.peer_id))
        return dataclasses.replace(outcome, carried=carried, inner_steps=leader.inner_steps)

    def _end_attempt(self, leader: LeaderDecision, outcome: Outcome) -> None:
        """All ranks have the same answer: the attempt is over, or carried and then still on its way."""
        uplink, downlink = self._joined()
        taken = isinstance(outcome, Committed)
        carried = isinstance(outcome, Committed) and outcome.carried
        traffic = self._ranks.collect((self.traffic.sent, self.traffic.received))
        del traffic[self._ranks.rank]

        def end() -> None:
            if not carried:
                uplink.end_attempt(leader.round_id)
                if self._report.heartbeat.state is not PeerState.STARTING:
                    self._set_state(PeerState.TRAINING)
            uplink.advance()
            downlink.forget(taken=taken)
            self._report.other_ranks = Traffic(sum(sent for sent, _ in traffic), sum(received for _, received in traffic))

        self._io.change(end)

    # ---- reporting and leaving -------------------------------------------------------------------------------------------

    def report(self, progress: Progress) -> None:
        """Say this in heartbeats from now on (bytes are filled in); one goes out at once when step, digest or state changed."""
        progress = dataclasses.replace(progress, **self._hidden)
        heartbeat = Heartbeat(
            state=PeerState.EXCHANGING if progress.exchanging else PeerState.TRAINING,
            outer_step=progress.outer_step,
            digest=progress.digest,
            inner_steps=progress.inner_steps,
            round_inner_steps=progress.round_inner_steps,
            loss=progress.loss,
            tokens_per_s=progress.tokens_per_s,
            step_s=progress.step_s,
            device=progress.device,
            metrics=progress.metrics,
        )
        self._io.post(partial(self._say, heartbeat))

    @property
    def sending(self) -> bool:
        """Whether parts of a contribution wait to be sent, or for the coordinator's receipt; any thread."""
        links = self._links
        return links is not None and self._io.read(lambda: links[0].sending)

    @property
    def awaits(self) -> int | None:
        """The outer step that this peer is at, while its contribution has no outcome; None: there is none. Any thread."""
        links = self._links
        if links is None:
            return None
        return self._io.read(lambda: links[0].position if links[0].sent is not None else None)

    @property
    def origin(self) -> Origin | None:
        """Where the last snapshot came from."""
        return self._data.origin

    @property
    def connected(self) -> bool:
        """Whether the coordinator is heard at present."""
        return self._io.read(lambda: self._session.view is not None)

    @property
    def ended(self) -> bool:
        """Whether the run has finished, at whatever outer step; all ranks ask together."""
        return self._agreement.flag(lambda: (view := self._session.last_view) is not None and view.phase is RunPhase.FINISHED)

    @property
    def cut_off(self) -> bool:
        """Whether the coordinator has not been heard for longer than two heartbeats; all ranks ask together."""
        return self._agreement.flag(lambda: self._session.cut_off(time.monotonic()))

    @property
    def last_view(self) -> View | None:
        """The newest view of the run that this rank has, also after the connection was lost."""
        return self._io.read(lambda: self._session.last_view)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received on the data plane since the process started."""
        return self._report.traffic

    def check(self) -> None:
        """Raise EvictedError or RefusedError when the coordinator has expelled this peer, Interrupted when asked to stop.

        What is raised at one rank is raised at all.
        """
        self._agreement.check()

    def interrupt(self) -> None:
        """End the main thread's waits with Interrupted; safe in a signal handler."""
        self._io.interrupt()

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye, within two seconds, and close the connections. reason: for the coordinator's operator.

        In a process that was forked since, do nothing: the connections are its parent's.
        """
        if self._io.forked:
            return
        self._io.resume()
        self._io.change(self._leave_masks)
        if self._attendance is not None:
            self._io.call(self._attendance.goodbye(reason))
        self._io.change(self._abandon)
        self._io.call(self._channels.close())

    def _leave_masks(self) -> None:
        """Take no further step of a masked round: after the goodbye nobody waits for this peer's keys."""
        masking, self._masking = self._masking, None
        if masking is not None:
            masking.follow(0, 0, ())

    def _abandon(self) -> None:
        if self._links is not None:
            uplink, downlink = self._links
            uplink.end_attempt(0)
            downlink.forget(taken=False)

    def _joined(self) -> tuple[Uplink, Downlink]:
        if self._links is None:
            raise LocalProtocolError("join() first")
        return self._links

    def _online(self) -> bool:
        """Whether a transfer is worth another try (loop's thread)."""
        return not self._session.cut_off(time.monotonic())

    def _trouble(self) -> BaseException | None:
        refused = None if self._links is None else self._links[0].refused
        return self._io.trouble or self._session.expulsion or refused

    def tell(self) -> None:
        """Send a heartbeat now. On the loop's thread."""
        if self._attendance is not None:
            self._attendance.nudge()

    def _say(self, heartbeat: Heartbeat) -> None:
        if self._report.say(heartbeat):
            self.tell()

    def _set_state(self, state: PeerState) -> None:
        self._say(dataclasses.replace(self._report.heartbeat, state=state))


def _dropped(commit: Commit, peer_id: str) -> Commit:
    """Return the commit as if it had refused a contribution that it does not name."""
    verdict = PeerVerdict(peer_id=peer_id, verdict=Verdict.REJECTED, norm=0.0, weight=0.0)

    def refused(part: FragmentCommit) -> FragmentCommit:
        return dataclasses.replace(part, verdicts=tuple(sorted((*part.verdicts, verdict), key=lambda one: one.peer_id)))

    return dataclasses.replace(commit, fragments=tuple(refused(part) for part in commit.fragments))


async def _arrived(coming: concurrent.futures.Future[tuple[Schema, Snapshot]], schema: Schema) -> Snapshot | None:
    try:
        theirs, snapshot = await asyncio.wrap_future(coming)
    except EditError as error:
        _log.info("the snapshot that was fetched ahead: %s", error)
        return None
    return snapshot if theirs.schema_hash == schema.schema_hash else None


def read_configuration(
    io: IoThread,
    channels: Channels,
    identity: Identity,
    ranks: Ranks = ALONE,
    parser: ConfigParser | None = None,
    draw: Callable[[], float] = random.random,
) -> tuple[RunConfig, int]:
    """Return the run's configuration and outer step: attend without a schema until they come, then leave.

    Closes the channels, which open again when they are used. All ranks of a replica call it together. Raises RefusedError,
    EvictedError, Interrupted, and ConfigError when this software does not understand the configuration.
    """
    session = Session(draw, time.monotonic())
    agreement = RankAgreement(io, ranks, lambda: io.trouble or session.expulsion)
    attendance = Attendance(
        channels=channels,
        session=session,
        io=io,
        hello=_hello(identity, ranks, ""),
        schema=None,
        report=Report(Heartbeat(state=PeerState.STARTING), Traffic()),
        parser=parser or ConfigParser(),
        changed=lambda: None,
    )
    try:
        if ranks.leads:
            io.spawn(attendance.run())
        agreement.decide(lambda: session.welcome)
        agreement.on_leader(lambda: attendance.goodbye("the configuration is read"))
        return agreement.decide(lambda: attendance.welcome)
    finally:
        io.resume()
        io.call(channels.close())


def ask_configuration(
    endpoints: Sequence[str], credentials: grpc.ChannelCredentials, identity: Identity
) -> tuple[RunConfig, str]:
    """Return the run's configuration, and its text; ask each endpoint, and wait for none. For a command, which runs no loop.

    Raises TransportError, RefusedError, EvictedError, RemoteProtocolError, and ConfigError as `read_configuration`.
    """
    hello = _hello(identity, ALONE, "")
    welcome = first_answer(
        endpoints, credentials, lambda channel: ask_welcome(channel, hello), lambda endpoint: f"the coordinator at {endpoint}"
    )
    config = ConfigParser().parse(welcome)
    if not isinstance(config, RunConfig):
        raise config
    return config, welcome.config_json


def _hello(identity: Identity, ranks: Ranks, schema_hash: str) -> Hello:
    return Hello(run_id=identity.run_id, schema_hash=schema_hash, software=SOFTWARE, rank=ranks.rank, ranks=ranks.size)
