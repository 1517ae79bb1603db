"""`edit.Collective` over gRPC: one rank's connection to a coordinator. A peer of several ranks has one at each.

Owns: how the parts (session, bridge, control and data connections, uplink, downlink, agreement) answer the five questions of
the seam, and when the main thread waits. The main thread calls; the loop's thread does the I/O. Must not know: models,
optimizers, files.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from edit.config.run import RunConfig
from edit.errors import (
    EvictedError,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    TransportError,
)
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Aborted, Committed, Contribution, Evicted, Finished, NeedsSnapshot, Outcome, Snapshot
from edit.replica.ranks import ALONE, Ranks
from editpb.identity import Identity
from editpb.messages import Heartbeat, Hello, PeerState, RunPhase, View
from peers.carriers.hub.channels import Channels, Traffic
from peers.carriers.hub.control_stream import Attendance, Report, understood
from peers.carriers.hub.data_calls import DataPlane
from peers.carriers.hub.downlink import Downlink
from peers.carriers.hub.founding import found_or_wait
from peers.carriers.hub.session import Decision, Session
from peers.carriers.hub.snapshot_donors import Origin
from peers.carriers.hub.snapshot_prefetch import SnapshotPrefetch
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.hub.uplink import ATTEMPTS, Uplink, headers
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement

__all__ = ["HubCollective"]

SOFTWARE = "edit-localsgd 0.1.0"
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Entered:
    """What exists once `join` was called."""

    attendance: Attendance
    uplink: Uplink
    downlink: Downlink


@dataclass(frozen=True, slots=True)
class LeaderDecision:
    """What rank 0 says of an outer step. round_id: the one that its contribution names, or 0; carried: a contribution that the
    commit does not have may be part of a later one; inner_steps: until the next contribution, 0: no word."""

    decision: Decision
    reason: str
    round_id: int = 0
    carried: bool = False
    inner_steps: int = 0


class HubCollective:
    """One rank's side of a run. Use inside an open `IoThread`; call `close` before the bridge ends, to say goodbye.

    All ranks of a replica make the same calls in the same order, but for `report`, `traffic`, `connected`, `interrupt` and
    `close`. What rank 0 hears decides; what every rank must have is taken by all or by none.
    lazy: commits come with their payloads still arriving; clock: monotonic seconds; draw: random numbers in [0, 1). ahead: may
    fetch what `join` will return. together: those of this peer that train once this one has joined; only then they are awaited.
    """

    def __init__(
        self,
        bridge: IoThread,
        dial: Channels,
        identity: Identity,
        *,
        ranks: Ranks = ALONE,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._bridge = bridge
        self._dial = dial
        self._identity = identity
        self._ranks = ranks
        self._lazy = lazy
        self._clock, self._draw = clock, draw
        self._session = Session(draw, clock())
        self._agreement = RankAgreement(bridge, ranks, lambda: bridge.read(self._trouble))
        self._report = Report(Heartbeat(state=PeerState.STARTING), Traffic())
        self._data = DataPlane(dial, identity.run_id, self._report.traffic, draw)
        self.ahead = SnapshotPrefetch(bridge, self._data, ranks)
        self.together: Sequence[HubCollective] = (self,)
        self._entered: _Entered | None = None
        self._carries = False  # whether contributions outlive their rounds
        self._position = 0  # the outer step that the caller last asked about

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._identity.peer_id

    # ---- entering --------------------------------------------------------------------------------------------------------

    def configuration(self) -> tuple[RunConfig, int]:
        """The run's configuration and outer step: attends without a schema until told, then leaves. Interrupted ends the wait.

        Raises RefusedError, EvictedError, ConfigError when this software does not understand the configuration.
        """
        session = Session(self._draw, self._clock())
        agreement = RankAgreement(self._bridge, self._ranks, lambda: self._bridge.trouble or session.expulsion)
        if self._ranks.leads:
            attendance = self._attend(session, None, lambda: None)
        welcome = agreement.decide(lambda: session.welcome)
        agreement.led(lambda: attendance.goodbye("the configuration is read"))
        return understood(welcome.config_json), welcome.outer_step

    def join(self, schema: Schema, found: Callable[[], Sequence[Tensor]], shards: Sequence[Shard] | None = None) -> Snapshot:
        """See `Collective.join`. Returns when the first round is open (all peers start together) or the run is under way.

        Raises ConfigError when the ranks of this replica have different models.
        """
        if self._entered is not None:
            raise LocalProtocolError("joined twice")
        self._ranks.same("the model (its schema)", schema.schema_hash)
        uplink, held = self._new_uplink(schema), [Shard(each) for each in schema.fragments] if shards is None else shards
        downlink = Downlink(self._bridge, self._data, self._agreement, schema, held, self._online)
        attendance = self._attend(self._session, schema, lambda: self._heard(uplink, downlink))
        self._entered = _Entered(attendance=attendance, uplink=uplink, downlink=downlink)
        found_or_wait(self._agreement, self._session, self._data, schema, found, self._online)
        welcome = self._agreement.decide(lambda: self._session.welcome)
        self._configure(self._entered, understood(welcome.config_json))
        snapshot = self._agreement.together(self.ahead.of(schema)) or self._first_snapshot()
        self.report(Heartbeat(state=PeerState.STARTING, outer_step=snapshot.outer_step, digest=snapshot.digest))
        for one in self.together:
            one._set_state(PeerState.TRAINING)
        for one in self.together:
            one._agreement.decide(one._under_way)
        return snapshot

    def _under_way(self) -> bool | None:
        return self._session.under_way or None

    def _configure(self, entered: _Entered, config: RunConfig) -> None:
        entered.downlink.configure(config.sync)
        self._carries = config.rounds.max_staleness > 0
        heartbeat_s, staleness = config.membership.heartbeat_s, config.rounds.max_staleness
        self._bridge.change(lambda: self._session.configure(heartbeat_s, staleness))

    def _attend(self, session: Session, schema: Schema | None, changed: Callable[[], None]) -> Attendance:
        identity, ranks = self._identity, self._ranks
        attendance = Attendance(
            dial=self._dial,
            session=session,
            bridge=self._bridge,
            hello=Hello(run_id=identity.run_id, schema=schema, software=SOFTWARE, rank=ranks.rank, ranks=ranks.size),
            report=self._report,
            changed=changed,
            clock=self._clock,
        )
        self._bridge.spawn(attendance.run())
        return attendance

    def _heard(self, uplink: Uplink, downlink: Downlink) -> None:
        """News (loop's thread): send what can be sent; fetch an update that will be asked for while training goes on."""
        self._bridge.change(uplink.advance)
        step = self._position
        if (sent := self._bridge.read(lambda: uplink.sent_to(step))) is None:
            return
        decision, _ = self._bridge.read(lambda: self._session.decide(step, sent, self._clock()))
        if decision is Decision.COMMITTED:
            downlink.foresee(step + 1)

    def _new_uplink(self, schema: Schema) -> Uplink:
        started_ms = self._ranks.lead(lambda: time.time_ns() // 10**6)
        return Uplink(
            self._bridge,
            self._session,
            self._data,
            headers(self._identity, schema, self._ranks.rank),
            lambda wanted: self._data.latest(schema, wanted),
            attempt=started_ms * ATTEMPTS,
            follows=not self._ranks.leads,
        )

    def _first_snapshot(self) -> Snapshot:
        while True:
            try:
                return self.snapshot()
            except TransportError as error:
                _log.info("%s; waiting for the coordinator", error)
                self._agreement.decide(lambda: self._session.view)

    # ---- the rounds ------------------------------------------------------------------------------------------------------

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`: queued, sent once a round for its outer step is open. Not agreed on: a rank that owns
        nothing of a fragment need not call it."""
        uplink = self._inside().uplink
        self._position = max(self._position, contribution.outer_step)
        self._stands_at(self._position)
        self._bridge.change(lambda: uplink.add(contribution))
        self._bridge.post(lambda: self._bridge.change(uplink.advance))
        self._set_state(PeerState.EXCHANGING)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`. None although block: in doubt, the control connection has been down for two heartbeats.

        What was never sent is not in doubt: cut off, it is withdrawn and Aborted. Raises RefusedError, Interrupted.
        """
        word = LeaderDecision(Decision.EVICTED, "")
        self._position = outer_step
        try:
            word = self._decision(outer_step, block)
            outcome = self._act(word, outer_step)
        except EvictedError as error:
            outcome = Evicted(str(error))
        if outcome is not None:
            carried = isinstance(outcome, Committed) and outcome.carried
            self._settle(word, fetched=isinstance(outcome, Committed), carried=carried)
        return outcome

    def snapshot(self) -> Snapshot:
        """See `Collective.snapshot`. Raises TransportError also when what arrived was damaged again and again."""
        try:
            snapshot = self._inside().downlink.snapshot()
        except TransportError:
            self._agreement.rest(lambda: self._session.view)  # or who asks again and again would do nothing else
            raise
        self._bridge.change(self._session.resynced)
        return snapshot

    def _decision(self, outer_step: int, block: bool) -> LeaderDecision:
        def look() -> LeaderDecision | None:
            word = self._word(outer_step)
            return None if word.decision is Decision.WAIT else word

        self._share(outer_step)
        if not block:
            return self._agreement.ask(lambda: self._word(outer_step))
        while (word := self._agreement.soon(look)) is None:
            self._share(outer_step)
        if word.decision is Decision.CUT_OFF:  # as in `snapshot`
            self._agreement.rest(lambda: self._session.view)
        return word

    def _share(self, outer_step: int) -> None:
        """All ranks name the same round, and know when the coordinator has refused the part of one of them."""
        if self._ranks.size == 1 or not self._carries:
            return
        uplink = self._inside().uplink
        known = self._ranks.collect(self._bridge.read(lambda: (uplink.proposal(outer_step), uplink.sent)))
        refused = next((sent for _, sent in known if sent is not None and sent.refused_at is not None), None)
        self._bridge.change(lambda: uplink.follow(known[0][0], refused))
        self._bridge.post(lambda: self._bridge.change(uplink.advance))

    def _word(self, outer_step: int) -> LeaderDecision:
        """Rank 0's own view of the matter (under the lock)."""
        session, uplink = self._session, self._inside().uplink
        sent = uplink.sent_to(outer_step)
        decision, reason = session.decide(outer_step, sent, self._clock())
        if decision is Decision.CUT_OFF and uplink.withdraw(outer_step):
            return LeaderDecision(Decision.ABORTED, f"{reason}; nothing was sent")
        inner_steps = session.view.inner_steps if session.view is not None else 0
        carried = session.carried_past(outer_step + 1, sent)
        return LeaderDecision(decision, reason, sent.round_id if sent is not None else 0, carried, inner_steps)

    def _act(self, word: LeaderDecision, outer_step: int) -> Outcome | None:
        match word.decision:
            case Decision.COMMITTED:
                return self._with_word(self._fetch(outer_step + 1), word)
            case Decision.ABORTED:
                return Aborted(word.reason)
            case Decision.BEHIND:
                return NeedsSnapshot(word.reason)
            case Decision.FINISHED:
                return Finished(outer_step)
            case Decision.EVICTED:
                return Evicted(word.reason)
            case Decision.REFUSED:
                raise RefusedError(word.reason)
        return None

    def _fetch(self, outer_step: int) -> Committed | NeedsSnapshot | None:
        """Every rank's part of the update that led to `outer_step`; None: one was cut off meanwhile, so ask again."""
        downlink = self._inside().downlink
        try:
            return downlink.begun(outer_step) if self._lazy else downlink.whole(outer_step)
        except TransportError as error:
            _log.info("%s", error)
            return None
        except (StaleError, RemoteProtocolError) as error:
            return NeedsSnapshot(f"update {outer_step}: {error}")

    def _with_word(self, outcome: Committed | NeedsSnapshot | None, word: LeaderDecision) -> Committed | NeedsSnapshot | None:
        if not isinstance(outcome, Committed):
            return outcome
        merged = any(part.verdict_of(self.peer_id) is not None for part in outcome.commit.fragments)
        return dataclasses.replace(outcome, carried=word.carried and not merged, inner_steps=word.inner_steps)

    def _settle(self, word: LeaderDecision, *, fetched: bool, carried: bool) -> None:
        """All ranks have the same answer: the attempt is over, or carried and then still on its way."""
        entered = self._inside()
        if not carried:
            self._bridge.change(lambda: entered.uplink.settle(word.round_id))
            self._set_state(PeerState.TRAINING)
        self._bridge.post(lambda: self._bridge.change(entered.uplink.advance))
        (entered.downlink.settle if fetched else entered.downlink.abandon)()
        traffic = self._ranks.collect((self.traffic.sent, self.traffic.received))
        del traffic[self._ranks.rank]
        self._report.elsewhere = Traffic(sum(sent for sent, _ in traffic), sum(received for _, received in traffic))

    # ---- reporting and leaving -------------------------------------------------------------------------------------------

    def report(self, heartbeat: Heartbeat) -> None:
        """What heartbeats say from now on (bytes are filled in); one goes out at once when step, digest or state changed."""
        if self._report.say(heartbeat) and self._entered is not None:
            self._bridge.post(self._entered.attendance.nudge)

    def serves(self, server: SnapshotServer) -> None:
        """Tell of this server in heartbeats, from now on."""
        self._report.server = server

    @property
    def origin(self) -> Origin | None:
        """Where the last snapshot came from."""
        return self._data.origin

    @property
    def connected(self) -> bool:
        """Whether the coordinator is heard at present."""
        return self._bridge.read(lambda: self._session.view is not None)

    @property
    def ended(self) -> bool:
        """Whether the run has finished, at whatever outer step; all ranks ask together."""
        return self._agreement.flag(lambda: (view := self._session.last_view) is not None and view.phase is RunPhase.FINISHED)

    @property
    def cut_off(self) -> bool:
        """Whether the coordinator has not been heard for longer than two heartbeats; all ranks ask together."""
        return self._agreement.flag(lambda: self._session.cut_off(self._clock()))

    @property
    def last_view(self) -> View | None:
        """What this rank heard of the run last."""
        return self._bridge.read(lambda: self._session.last_view)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received on the data plane since the process started."""
        return self._report.traffic

    def check(self) -> None:
        """Raises EvictedError or RefusedError when the coordinator has expelled this peer, Interrupted when asked to stop: so
        for any rank, at every rank."""
        self._agreement.check()

    def interrupt(self) -> None:
        """End the main thread's waits with Interrupted; for signal handlers."""
        self._bridge.interrupt()

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye, within two seconds, and close the connections. reason: told to the coordinator's operator."""
        self._bridge.resume()
        if self._entered is not None:
            self._bridge.call(self._entered.attendance.goodbye(reason))
        self._bridge.call(self._data.close())

    def _inside(self) -> _Entered:
        if self._entered is None:
            raise LocalProtocolError("join() first")
        return self._entered

    def _online(self) -> bool:
        return not self._bridge.read(lambda: self._session.cut_off(self._clock()))

    def _trouble(self) -> BaseException | None:
        refused = None if self._entered is None else self._entered.uplink.refused
        return self._bridge.trouble or self._session.expulsion or refused

    def _stands_at(self, outer_step: int) -> None:
        """A caller that reports nothing itself is where its contribution says it is; or nobody would wait for it."""
        if outer_step > self._report.heartbeat.outer_step:
            self.report(dataclasses.replace(self._report.heartbeat, outer_step=outer_step, digest=""))

    def _set_state(self, state: PeerState) -> None:
        self.report(dataclasses.replace(self._report.heartbeat, state=state))
