"""`edit.Collective` over gRPC: one peer's connection to a coordinator.

Owns: how the parts (session, bridge, control and data connections, uplink) answer the five questions of the seam, and when the
main thread waits. The main thread calls; the loop's thread does the I/O. Must not know: models, optimizers, files.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from edit.boxes import Region
from edit.config import RunConfig
from edit.errors import (
    ConfigError,
    EvictedError,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    TransportError,
)
from edit.outer import digest as digest_of
from edit.records import Aborted, Behind, Committed, Contribution, Evicted, Finished, Outcome, Snapshot
from edit.schema import Schema
from editpb.identity import Identity
from editpb.messages import ContributionHeader, Heartbeat, Hello, PeerState, RunPhase
from peers.bridge import Bridge
from peers.control import Attendance, Report
from peers.data_plane import DataPlane
from peers.dial import Dial, Traffic
from peers.session import HAS_PARAMETERS, NEVER, Asked, Decision, Session
from peers.uplink import Uplink

__all__ = ["GrpcCollective"]

SOFTWARE = "edit-localsgd 0.1.0"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class _Entered:
    """What exists once `join` was called."""

    schema: Schema
    attendance: Attendance
    uplink: Uplink


class GrpcCollective:
    """One peer's side of a run. Use inside an open `Bridge`; call `close` before the bridge ends, to say goodbye.

    clock: monotonic seconds; draw: random numbers in [0, 1), for the spread of reconnections.
    """

    def __init__(
        self,
        bridge: Bridge,
        dial: Dial,
        identity: Identity,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._bridge = bridge
        self._dial = dial
        self._identity = identity
        self._clock = clock
        self._draw = draw
        self._session = Session(draw, clock())
        self._report = Report(Heartbeat(state=PeerState.STARTING), Traffic())
        self._data = DataPlane(dial, identity.run_id, self._report.traffic)
        self._entered: _Entered | None = None

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._identity.peer_id

    # ---- entering --------------------------------------------------------------------------------------------------------

    def configuration(self) -> RunConfig:
        """The run's configuration: attends without a schema until welcomed, then leaves. Waits for ever; Interrupted ends it.

        Raises RefusedError, EvictedError, ConfigError when this software does not understand the configuration.
        """
        session = Session(self._draw, self._clock())
        attendance = self._attend(session, None, lambda: None)
        welcome = self._wait(session, lambda: session.welcome)
        self._bridge.call(attendance.goodbye("the configuration is read"))
        try:
            return RunConfig.from_json(welcome.config_json)
        except ConfigError as error:
            raise ConfigError(f"the run's configuration does not fit this version of the software: {error}") from error

    def join(self, schema: Schema, found: Callable[[], Sequence[Tensor]], regions: Sequence[Region] | None = None) -> Snapshot:
        """See `Collective.join`. Returns when the first round is open (all peers start together) or the run is under way."""
        if self._entered is not None:
            raise LocalProtocolError("joined twice")
        uplink = Uplink(self._bridge, self._session, self._data, lambda c, round_id: self._header(schema, c, round_id))
        attendance = self._attend(self._session, schema, uplink.advance)
        self._entered = _Entered(schema=schema, attendance=attendance, uplink=uplink)
        self._found_or_wait(schema, found)
        snapshot = self._first_snapshot()
        self.report(Heartbeat(state=PeerState.TRAINING, outer_step=snapshot.outer_step, digest=snapshot.digest))
        self._wait(self._session, lambda: self._session.under_way or None)
        return snapshot

    def _attend(self, session: Session, schema: Schema | None, changed: Callable[[], None]) -> Attendance:
        hello = Hello(run_id=self._identity.run_id, schema=schema, software=SOFTWARE)
        attendance = Attendance(
            dial=self._dial,
            session=session,
            bridge=self._bridge,
            hello=hello,
            report=self._report,
            changed=changed,
            clock=self._clock,
        )
        self._bridge.spawn(attendance.run())
        return attendance

    def _found_or_wait(self, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> None:
        """Until the run has parameters. Sends this peer's own each time it is newly asked to."""
        answered = NEVER
        while (asked := self._asked_to_found(answered)) is not HAS_PARAMETERS:
            theta = list(found())
            try:
                self._bridge.call(self._data.found(schema, theta, digest_of(theta), self._online))
                answered = asked.settled()
            except (StaleError, TransportError, RefusedError) as error:
                _log.info("founding: %s", error)  # a view will tell who founds the run now
                answered = asked

    def _asked_to_found(self, answered: Asked) -> Asked:
        return self._wait(self._session, lambda: self._session.founding(answered))

    def _first_snapshot(self) -> Snapshot:
        while True:
            try:
                return self.snapshot()
            except TransportError as error:
                _log.info("%s; waiting for the coordinator", error)
                self._wait(self._session, lambda: self._session.view)

    # ---- the rounds ------------------------------------------------------------------------------------------------------

    def contribute(self, contribution: Contribution) -> None:
        """See `Collective.contribute`: queued, sent once a round for its outer step is open."""
        uplink = self._inside().uplink
        self._stands_at(contribution.outer_step)
        self._bridge.change(lambda: uplink.add(contribution))
        self._bridge.post(lambda: self._bridge.change(uplink.advance))
        self._set_state(PeerState.EXCHANGING)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`. None although block: in doubt, the control connection has been down for two heartbeats.

        What was never sent is not in doubt: cut off, it is withdrawn and Aborted. Raises RefusedError, Interrupted.
        """
        decision, reason = self._decision(outer_step, block)
        outcome = self._act(decision, reason, outer_step)
        if outcome is not None:
            self._bridge.change(self._inside().uplink.drop)
            self._bridge.post(lambda: self._bridge.change(self._inside().uplink.advance))
            self._set_state(PeerState.TRAINING)
        return outcome

    def snapshot(self) -> Snapshot:
        """See `Collective.snapshot`. Raises TransportError also when what arrived was damaged again and again."""
        schema = self._inside().schema
        try:
            snapshot = self._bridge.call(self._data.snapshot(schema, self._online))
        except (RemoteProtocolError, StaleError) as error:
            raise TransportError(f"no snapshot: {error}") from error
        self._bridge.change(self._session.healed)
        return snapshot

    def _decision(self, outer_step: int, block: bool) -> tuple[Decision, str]:
        uplink = self._inside().uplink

        def look() -> tuple[Decision, str] | None:
            self._raise_if_refused()
            decision, reason = self._session.decide(outer_step, uplink.round_of(outer_step), self._clock())
            if decision is Decision.CUT_OFF and uplink.withdraw(outer_step):
                return Decision.ABORTED, f"{reason}; nothing was sent"
            return None if block and decision is Decision.WAIT else (decision, reason)

        answer = self._bridge.wait(look)
        assert answer is not None  # without a timeout `wait` returns what it waited for
        return answer

    def _act(self, decision: Decision, reason: str, outer_step: int) -> Outcome | None:
        match decision:
            case Decision.COMMITTED:
                return self._fetch(outer_step + 1)
            case Decision.ABORTED:
                return Aborted(reason)
            case Decision.BEHIND:
                return Behind(reason)
            case Decision.FINISHED:
                return Finished(outer_step)
            case Decision.EVICTED:
                return Evicted(reason)
            case Decision.REFUSED:
                raise RefusedError(reason)
        return None

    def _fetch(self, outer_step: int) -> Committed | Behind | None:
        """The update that led to `outer_step`; None: cut off meanwhile, so ask again."""
        try:
            return Committed(self._bridge.call(self._data.update(outer_step, self._inside().schema, self._online)))
        except TransportError as error:
            _log.info("%s", error)
            return None
        except (StaleError, RemoteProtocolError) as error:
            return Behind(f"update {outer_step}: {error}")

    def _header(self, schema: Schema, contribution: Contribution, round_id: int) -> ContributionHeader:
        payload = contribution.payload
        return ContributionHeader(
            run_id=self._identity.run_id,
            round_id=round_id,
            outer_step=contribution.outer_step,
            peer_id=self._identity.peer_id,
            fragment_id=contribution.fragment_id,
            schema_hash=schema.schema_hash,
            inner_steps=contribution.inner_steps,
            tokens=contribution.tokens,
            codec=payload.codec,
            numel=payload.numel,
            total_bytes=memoryview(payload.data).nbytes,
        )

    # ---- reporting and leaving -------------------------------------------------------------------------------------------

    def report(self, heartbeat: Heartbeat) -> None:
        """What heartbeats say from now on (bytes are filled in); one goes out at once when step, digest or state changed."""
        before, self._report.heartbeat = self._report.heartbeat, heartbeat
        if self._entered is not None and _headline(before) != _headline(heartbeat):
            self._bridge.post(self._entered.attendance.nudge)

    @property
    def connected(self) -> bool:
        """Whether the coordinator is heard at present."""
        return self._bridge.read(lambda: self._session.view is not None)

    def over(self, outer_step: int) -> bool:
        """Whether the run has finished, and a peer at `outer_step` is there too or can no longer get there (cut off)."""

        def look() -> bool:
            last = self._session.last_view
            if last is None or last.phase is not RunPhase.FINISHED:
                return False
            return last.outer_step == outer_step or self._session.cut_off(self._clock())

        return self._bridge.read(look)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received on the data plane since the process started."""
        return self._report.traffic

    def check(self) -> None:
        """Raises EvictedError or RefusedError when the coordinator has expelled this peer, Interrupted when asked to stop."""
        self._wait(self._session, lambda: True)

    def interrupt(self) -> None:
        """End the main thread's waits with Interrupted; for signal handlers."""
        self._bridge.interrupt()

    def close(self, reason: str = "the peer stopped") -> None:
        """Say goodbye, within two seconds, and close the connections. reason: told to the coordinator's operator."""
        self._bridge.resume()
        if self._entered is not None:
            self._bridge.call(self._entered.attendance.goodbye(reason))
        self._bridge.call(self._data.close())

    # ---- parts -----------------------------------------------------------------------------------------------------------

    def _inside(self) -> _Entered:
        if self._entered is None:
            raise LocalProtocolError("join() first")
        return self._entered

    def _online(self) -> bool:
        return not self._bridge.read(lambda: self._session.cut_off(self._clock()))

    def _wait(self, session: Session, look: Callable[[], _T | None]) -> _T:
        """Wait until `look` gives a value. Raises EvictedError, RefusedError, Interrupted."""

        def guarded() -> _T | None:
            if session.expel is not None:
                raise (EvictedError if session.expel.evicted else RefusedError)(session.expel.reason)
            self._raise_if_refused()
            return look()

        answer = self._bridge.wait(guarded)
        assert answer is not None  # without a timeout `wait` returns what it waited for
        return answer

    def _raise_if_refused(self) -> None:
        if self._entered is not None and self._entered.uplink.refused is not None:
            raise self._entered.uplink.refused

    def _stands_at(self, outer_step: int) -> None:
        """A caller that reports nothing itself is where its contribution says it is; or nobody would wait for it."""
        if outer_step > self._report.heartbeat.outer_step:
            self.report(dataclasses.replace(self._report.heartbeat, outer_step=outer_step, digest=""))

    def _set_state(self, state: PeerState) -> None:
        self.report(dataclasses.replace(self._report.heartbeat, state=state))


def _headline(heartbeat: Heartbeat) -> tuple[PeerState, int, str]:
    return heartbeat.state, heartbeat.outer_step, heartbeat.digest
