"""The control connection: attends the run for as long as the process lives, over any number of streams.

Owns: Hello, heartbeats, the reader of the coordinator's messages, reconnection with the session's delays, Goodbye. Hands what
it hears to the session and decides nothing itself. Must not know: the data plane, torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, EvictedError, RefusedError, RemoteProtocolError, TransportError
from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import coordinator_message_from_pb, peer_message_to_pb
from editpb.messages import Expel, Goodbye, Heartbeat, Hello, View, Welcome
from editpb.status import from_rpc
from peers.carriers.hub.channels import Channels, Traffic, handshake_refusal
from peers.carriers.hub.session import Session
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.io_thread import IoThread

__all__ = ["Attendance", "Report", "understood"]

ANSWER_S = 10.0
GOODBYE_S = 0.5
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Call: TypeAlias = grpc.aio.StreamStreamCall[control_pb2.PeerMessage, control_pb2.CoordinatorMessage]


@dataclass(slots=True)
class Report:
    """What this peer says of itself: the main thread replaces `heartbeat`, the data plane counts `traffic`.

    elsewhere: the traffic of the replica's other ranks, as far as it is known here; server: of snapshots, if it serves any.
    """

    heartbeat: Heartbeat
    traffic: Traffic
    elsewhere: Traffic = field(default_factory=Traffic)
    server: SnapshotServer | None = None

    def say(self, heartbeat: Heartbeat) -> bool:
        """Take what is to be said from now on; whether that is worth a heartbeat at once."""
        before, self.heartbeat = self.heartbeat, heartbeat
        return (before.state, before.outer_step, before.digest) != (heartbeat.state, heartbeat.outer_step, heartbeat.digest)

    def current(self) -> Heartbeat:
        """The heartbeat of this moment."""
        sent, received = self.traffic.sent + self.elsewhere.sent, self.traffic.received + self.elsewhere.received
        heartbeat, server = self.heartbeat, self.server
        if server is None:
            return dataclasses.replace(heartbeat, bytes_sent=sent, bytes_received=received)
        serving = server.offer(heartbeat.outer_step) if heartbeat.digest else None
        return dataclasses.replace(heartbeat, bytes_sent=sent + server.traffic.sent, bytes_received=received, serving=serving)


class Attendance:
    """Keeps the Attend stream alive until the coordinator expels this peer or `goodbye` is called.

    changed: called on the loop's thread after every message and every loss of the connection. clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        dial: Channels,
        session: Session,
        bridge: IoThread,
        hello: Hello,
        report: Report,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dial = dial
        self._session = session
        self._bridge = bridge
        self._hello = hello
        self._report = report
        self._changed = changed
        self._clock = clock
        self._nudge = asyncio.Event()
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._said: set[str] = set()  # in this outage: each line once
        self._reason = ""

    async def run(self) -> None:
        """Attend for ever; returns after an Expel or a Goodbye."""
        try:
            while not self._leaving.is_set():
                reason = await self._attempt()
                delay = self._session.reconnect_delay()
                answered = self._hello.schema is None and self._session.welcome is not None
                if delay is None or answered or self._leaving.is_set():
                    return
                self._say_once(f"{self._dial.endpoint}: {reason}; trying again")
                self._dial.rotate()
                await _first(self._leaving.wait(), within_s=delay)
        finally:
            self._left.set()

    def nudge(self) -> None:
        """Send a heartbeat now (loop's thread)."""
        self._nudge.set()

    async def goodbye(self, reason: str) -> None:
        """Leave politely: the coordinator need not wait for this peer's lease. Bounded in time."""
        self._reason = reason
        self._leaving.set()
        await _first(self._left.wait(), within_s=2 * GOODBYE_S)

    async def _attempt(self) -> str:
        self._tell(self._session.dialled)
        channel = self._dial.channel()
        try:
            await self._converse(control_pb2_grpc.ControlStub(channel).Attend())
        except grpc.aio.AioRpcError as error:
            return self._refused(error)
        except (EditError, asyncio.InvalidStateError) as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {ANSWER_S:g} s"
        finally:
            self._tell(lambda: self._session.down(self._clock()))
            await channel.close()

    async def _converse(self, call: _Call) -> NoReturn:
        speaker: asyncio.Task[None] | None = None
        try:
            await call.write(peer_message_to_pb(self._hello))
            async with asyncio.timeout(ANSWER_S):
                self._hear(await call.read())
            self._said.clear()
            _log.info("%s: connected", self._dial.endpoint)
            speaker = asyncio.create_task(self._speak(call))
            while True:
                self._hear(await call.read())
        finally:
            if speaker is not None:
                speaker.cancel()
                await asyncio.wait([speaker])
            call.cancel()

    async def _speak(self, call: _Call) -> None:
        """Heartbeats until the stream breaks (the reader hears of it too), then Goodbye when leaving."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not self._leaving.is_set():
                self._nudge.clear()
                await call.write(peer_message_to_pb(self._bridge.read(self._report.current)))
                await _first(self._nudge.wait(), self._leaving.wait(), within_s=self._session.heartbeat_s)
            await call.write(peer_message_to_pb(Goodbye(self._reason)))
            await call.done_writing()
            await asyncio.wait([asyncio.ensure_future(call.code())], timeout=GOODBYE_S)
            call.cancel()

    def _hear(self, message: object) -> None:
        if not isinstance(message, control_pb2.CoordinatorMessage):
            raise TransportError("the coordinator closed the stream")  # grpc.aio.EOF
        heard = coordinator_message_from_pb(message)
        if isinstance(heard, Welcome):
            wrong = self._tell(lambda: self._session.welcomed(heard))
            with contextlib.suppress(ConfigError):  # the main thread reads it too, and tells the user
                config = RunConfig.from_json(heard.config_json)
                self._session.configure(config.membership.heartbeat_s, config.rounds.max_staleness)
        elif isinstance(heard, View):
            if heard.reason:
                self._say_once(heard.reason)
            wrong = self._tell(lambda: self._session.viewed(heard))
        else:
            wrong = self._tell(lambda: self._session.expelled(heard))
        if wrong is not None:
            raise RemoteProtocolError(wrong)

    def _refused(self, error: grpc.aio.AioRpcError) -> str:
        """The reason of a failed stream. A refusal for good ends the session.

        Before the first Welcome so does a Hello that is not understood, or a certificate of another authority.
        """
        blame = from_rpc(error)
        stranger = handshake_refusal(str(blame))
        reason = f"{self._dial.endpoint}: {stranger}" if stranger else str(blame)
        misfit = error.code() is grpc.StatusCode.INVALID_ARGUMENT or stranger is not None
        if isinstance(blame, (EvictedError, RefusedError)) or (misfit and self._session.welcome is None):
            self._tell(lambda: self._session.expelled(Expel(isinstance(blame, EvictedError), reason)))
        return reason

    def _tell(self, event: Callable[[], _T]) -> _T:
        try:
            return self._bridge.change(event)
        finally:
            self._changed()

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.info("%s", line)


def understood(config_json: str) -> RunConfig:
    """The run's configuration. Raises ConfigError when this software does not know it."""
    try:
        return RunConfig.from_json(config_json)
    except ConfigError as error:
        raise ConfigError(f"the run's configuration does not fit this version of the software: {error}") from error


async def _first(*waits: Coroutine[Any, Any, object], within_s: float) -> None:
    """Wait until one of `waits` is over, at most `within_s` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
