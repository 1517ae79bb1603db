"""The control connection: attends the run for as long as the process lives, over any number of streams.

It sends Hello, heartbeats and Goodbye, reads the coordinator's messages, and connects again after the session's delays. What it
hears goes to the session, which decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, EvictedError, RefusedError, RemoteProtocolError, TransportError
from edit.fragments.schema import Schema
from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import coordinator_message_from_pb, peer_message_to_pb, schema_answer_to_pb
from editpb.messages import (
    Configuration,
    Consent,
    Cosignature,
    Expel,
    Goodbye,
    Heartbeat,
    Hello,
    SchemaRequest,
    View,
    Welcome,
)
from editpb.transport.http_proxy import through
from editpb.transport.status import from_rpc, handshake_refusal
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.kept_configuration import KeptConfiguration
from peers.carriers.hub.session import Session
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Traffic

__all__ = ["Attendance", "Check", "ConfigParser", "Report", "ask_welcome", "configuration_of"]

_CLOSED = " (in the handshake this means: the coordinator is full, or by its clock this peer's certificate is not valid)"
ANSWER_S = 15.0  # for the Welcome, once connected
GOODBYE_S = 0.5  # for the stream to end after a Goodbye
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Call: TypeAlias = grpc.aio.StreamStreamCall[control_pb2.PeerMessage, control_pb2.CoordinatorMessage]
Check: TypeAlias = Callable[[str, RunConfig], Consent | None]


class ConfigParser:
    """Parses the configuration that aggregators send; a text that came before is not parsed again. On the loop's thread.

    check: raises ConfigError for a configuration that this peer's site does not allow, perhaps no longer: it is asked at each
        Welcome. It takes the text, too, and returns the consent that is to be said, if any.
    kept: the configuration that this peer takes part under, where changes of it need approvals; None: it keeps none.
    """

    def __init__(self, check: Check = lambda text, config: None, kept: KeptConfiguration | None = None) -> None:
        self._check, self._kept, self._text = check, kept, ""
        self.consent: Consent | None = None  # to what was parsed last
        self._config: RunConfig | ConfigError | RefusedError = ConfigError("nothing was parsed yet")

    def parse(self, welcome: Welcome) -> RunConfig | ConfigError | RefusedError:
        """Return the configuration of a Welcome, or why this peer does not take part under it.

        ConfigError: this software does not understand it, or the site does not allow it. RefusedError: it lacks approvals, or
        is another one than this process began with, whose signatures would not count.
        """
        before, other = self._config, welcome.config_json != self._text
        try:
            if other:
                self._text, self.consent = welcome.config_json, None
                self._config = self._parsed(welcome)
            elif self._kept is not None and isinstance(self._config, RunConfig) and welcome.configuration > self._kept.number:
                self._kept.check(configuration_of(welcome), welcome.changes)  # changed meanwhile, and taken back
            if isinstance(self._config, RunConfig):
                consent = self._check(self._text, self._config)
                self.consent = self.consent or consent  # signed once
            if other and self._kept is not None and isinstance(before, RunConfig) and before.audit.enabled:
                self._config = RefusedError(_other(welcome))
        except (ConfigError, RefusedError) as error:
            self._config = error
        return self._config

    def _parsed(self, welcome: Welcome) -> RunConfig:
        try:
            config = RunConfig.from_json(welcome.config_json)
        except ConfigError as error:
            raise ConfigError(f"the run's configuration does not fit this version of the software: {error}") from error
        if self._kept is not None:
            self._kept.check(configuration_of(welcome), welcome.changes)
        return config

    @property
    def known(self) -> int:
        """The number of the configuration that this peer takes part under; 0: it keeps none."""
        return self._kept.number if self._kept is not None else 0


async def ask_welcome(channel: grpc.aio.Channel, hello: Hello) -> Welcome:
    """Return the Welcome to a Hello without a schema_hash, with which the stream ends. For a command, which waits for nobody.

    Raises TransportError, RefusedError, EvictedError, RemoteProtocolError.
    """

    async def said() -> AsyncIterator[control_pb2.PeerMessage]:
        yield peer_message_to_pb(hello)

    call = control_pb2_grpc.ControlStub(channel).Attend(said())
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error
    except TimeoutError:
        raise TransportError(f"no answer within {ANSWER_S:g} s") from None
    finally:
        call.cancel()
    heard = _heard(answer)
    if isinstance(heard, Expel):
        raise (EvictedError if heard.evicted else RefusedError)(heard.reason)
    if not isinstance(heard, Welcome):
        raise RemoteProtocolError("the coordinator answers a Hello with something else than a Welcome")
    return heard


def configuration_of(welcome: Welcome) -> Configuration:
    """Return the configuration that a coordinator tells."""
    return Configuration(welcome.configuration, welcome.config_json)


def _other(welcome: Welcome) -> str:
    told = configuration_of(welcome)
    return f"the run has another configuration now, sha256:{told.digest}; start this peer again to take part under it"


@dataclass(slots=True)
class Report:
    """What this peer says of itself in heartbeats. It changes on the loop's thread only."""

    heartbeat: Heartbeat
    traffic: Traffic  # of this rank
    server: SnapshotServer | None = None  # serves this peer's snapshots, if any
    other_ranks: Traffic = field(default_factory=Traffic)  # the replica's, as far as it is known here
    # The newest head of the run's audit log that this peer vouches for; None: none.
    cosigned: Callable[[], Cosignature | None] = lambda: None

    def say(self, heartbeat: Heartbeat) -> bool:
        """Say this from now on; return whether it is worth a heartbeat at once."""
        before, self.heartbeat = self.heartbeat, heartbeat
        return (before.state, before.outer_step, before.digest) != (heartbeat.state, heartbeat.outer_step, heartbeat.digest)

    def current(self) -> Heartbeat:
        """Return the heartbeat of this moment."""
        sent, received = self.traffic.sent + self.other_ranks.sent, self.traffic.received + self.other_ranks.received
        heartbeat, server = dataclasses.replace(self.heartbeat, cosigned=self.cosigned()), self.server
        if server is None:
            return dataclasses.replace(heartbeat, bytes_sent=sent, bytes_received=received)
        serving = server.offer(heartbeat.outer_step) if heartbeat.digest else None
        return dataclasses.replace(heartbeat, bytes_sent=sent + server.traffic.sent, bytes_received=received, serving=serving)


class Attendance:
    """Keeps the Attend stream alive until the coordinator expels this peer or `goodbye` is called. On the loop's thread.

    Args:
        channels: to the coordinator.
        session: takes what is heard.
        io: the I/O thread, under whose lock the session changes.
        hello: the first message of each stream, with the number of the configuration that `parser` keeps; without a schema_hash
            the stream ends with the first Welcome.
        schema: of this peer's model, sent when the coordinator does not know the hash; None: there is no hash.
        report: what heartbeats say.
        parser: of the configuration in a Welcome.
        changed: called after every message and every loss of the connection.
        configured: called with the configuration of each Welcome under which this peer takes part.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        channels: Channels,
        session: Session,
        io: IoThread,
        hello: Hello,
        schema: Schema | None,
        report: Report,
        parser: ConfigParser,
        changed: Callable[[], None],
        configured: Callable[[RunConfig], None] = lambda config: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = channels
        self._session = session
        self._io = io
        self._hello = hello
        self._schema = schema
        self._report = report
        self._parser = parser
        self._changed = changed
        self._configured = configured
        self._clock = clock
        self._config: RunConfig | ConfigError | RefusedError | None = None  # of the last Welcome
        self._nudge = asyncio.Event()  # set: a heartbeat is due now
        self._leaving = asyncio.Event()  # set by `goodbye`
        self._left = asyncio.Event()  # set when `run` has ended
        self._said: set[str] = set()  # lines logged in this outage: each once
        self._reason = ""  # of the goodbye
        self._strangers: dict[str, str] = {}  # why the handshake failed at an endpoint the last time, where it did

    @property
    def welcome(self) -> tuple[RunConfig, int] | None:
        """The configuration and the outer step of the last Welcome; None before the first. Any thread, under the lock.

        Raises ConfigError when this software does not understand the configuration, or the site does not allow it; RefusedError
        when it lacks approvals.
        """
        if self._config is None or self._session.welcome is None:
            return None
        if not isinstance(self._config, RunConfig):
            raise self._config
        return self._config, self._session.welcome.outer_step

    async def run(self) -> None:
        """Attend until an Expel or a Goodbye."""
        try:
            while not self._leaving.is_set():
                endpoint = self._channels.endpoint
                reason = await self._attempt()
                delay = self._session.reconnect_delay()
                answered = not self._hello.schema_hash and self._session.welcome is not None
                if delay is None or answered or self._leaving.is_set():
                    return
                self._say_once(f"{endpoint}{through(endpoint)}: {reason}; trying again")
                if self._channels.endpoint == endpoint:
                    self._channels.rotate()
                    await _first(self._leaving.wait(), self._channels.pause(delay), within_s=delay)
        finally:
            self._left.set()

    def nudge(self) -> None:
        """Send a heartbeat now."""
        self._nudge.set()

    async def goodbye(self, reason: str) -> None:
        """Leave the run, so that the coordinator need not wait for this peer's lease; give up after twice `GOODBYE_S`."""
        self._reason = reason
        self._leaving.set()
        await _first(self._left.wait(), within_s=2 * GOODBYE_S)

    async def _attempt(self) -> str:
        self._tell(self._session.connecting)
        channel = self._channels.control()
        try:
            async with self._channels.while_here():
                await self._converse(self._channels.bound(control_pb2_grpc.ControlStub(channel)).Attend())
        except grpc.aio.AioRpcError as error:
            self._channels.refused(error)
            return self._refused(error)
        except (EditError, asyncio.InvalidStateError) as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {ANSWER_S:g} s"
        finally:
            self._tell(lambda: self._session.down(self._clock()))
            await self._channels.release(channel)

    async def _converse(self, call: _Call) -> NoReturn:
        speaker: asyncio.Task[None] | None = None
        try:
            await call.write(peer_message_to_pb(dataclasses.replace(self._hello, configuration=self._parser.known)))
            async with asyncio.timeout(ANSWER_S):
                asked = time.monotonic()
                answer = await call.read()
                self._channels.answered(time.monotonic() - asked)
                if self._schema is not None and _asks_for_schema(answer):
                    await call.write(schema_answer_to_pb(self._schema))
                    answer = await call.read()
                self._hear(answer)
            self._said.clear()
            _log.info("%s: connected", self._channels.endpoint)
            speaker = asyncio.create_task(self._speak(call))
            while True:
                self._hear(await call.read())
        finally:
            if speaker is not None:
                speaker.cancel()
                await asyncio.wait([speaker])
            call.cancel()

    async def _speak(self, call: _Call) -> None:
        """Send heartbeats until the stream breaks (the reader hears of it, too); when leaving, send Goodbye."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if self._parser.consent is not None and self._hello.rank == 0:
                await call.write(peer_message_to_pb(self._parser.consent))
            heartbeat: Heartbeat | None = None
            while not self._leaving.is_set():
                self._nudge.clear()
                heartbeat = self._report.current()
                await call.write(peer_message_to_pb(heartbeat))
                await _first(self._nudge.wait(), self._leaving.wait(), within_s=self._session.heartbeat_s)
            if _news(last := self._report.current()) != _news(heartbeat):  # the run's last outer step, or head, came meanwhile
                await call.write(peer_message_to_pb(last))
            await call.write(peer_message_to_pb(Goodbye(self._reason)))
            await call.done_writing()
            await asyncio.wait([asyncio.ensure_future(call.code())], timeout=GOODBYE_S)
            call.cancel()

    def _hear(self, message: object) -> None:
        heard = _heard(message)
        if isinstance(heard, SchemaRequest):
            raise RemoteProtocolError("the coordinator asks for a schema that it has, or that nobody announced")
        if isinstance(heard, Welcome):
            wrong = self._tell(lambda: self._welcomed(heard))
        elif isinstance(heard, View):
            if heard.reason:
                self._say_once(heard.reason)
            wrong = self._tell(lambda: self._session.viewed(heard))
        else:
            wrong = self._tell(lambda: self._session.expelled(heard))
        if wrong is not None:
            raise RemoteProtocolError(wrong)

    def _welcomed(self, welcome: Welcome) -> str | None:
        self._config = self._parser.parse(welcome)
        if isinstance(self._config, RunConfig):
            self._session.configure(self._config.membership.heartbeat_s, self._config.rounds.max_staleness)
        elif self._session.welcome is not None or isinstance(self._config, RefusedError):
            self._session.expelled(Expel(evicted=False, reason=str(self._config)))
            return None
        if (wrong := self._session.welcomed(welcome)) is None:
            self._channels.welcomed(welcome.first_round_id)
            if isinstance(self._config, RunConfig):
                self._configured(self._config)
        return wrong

    def _refused(self, error: grpc.aio.AioRpcError) -> str:
        """Return the reason of a failed stream. A refusal for good ends the session.

        So does, before the first Welcome, a Hello that is not understood, or a handshake that failed at every endpoint.
        """
        blame, endpoint = from_rpc(error), self._channels.endpoint
        reason = str(blame)
        if isinstance(blame, TransportError) and (stranger := handshake_refusal(reason)) is not None:
            return self._met_stranger(endpoint, stranger)
        self._strangers.pop(endpoint, None)
        if "Socket closed" in reason:
            reason += _CLOSED
        misfit = error.code() is grpc.StatusCode.INVALID_ARGUMENT and self._session.welcome is None
        if isinstance(blame, (EvictedError, RefusedError)) or misfit:
            self._tell(lambda: self._session.expelled(Expel(isinstance(blame, EvictedError), reason)))
        return reason

    def _met_stranger(self, endpoint: str, reason: str) -> str:
        self._strangers[endpoint] = reason
        met = {each: self._strangers[each] for each in self._channels.endpoints if each in self._strangers}
        if len(met) == len(set(self._channels.endpoints)) and self._session.welcome is None:
            told = "; ".join(f"{each}: {why}" for each, why in met.items())
            self._tell(lambda: self._session.expelled(Expel(evicted=False, reason=told)))
        return reason

    def _tell(self, event: Callable[[], _T]) -> _T:
        try:
            return self._io.change(event)
        finally:
            self._changed()

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.info("%s", line)


def _heard(message: object) -> Welcome | View | Expel | SchemaRequest:
    if not isinstance(message, control_pb2.CoordinatorMessage):
        raise TransportError("the coordinator closed the stream")  # grpc.aio.EOF
    return coordinator_message_from_pb(message)


def _news(heartbeat: Heartbeat | None) -> tuple[int, str, Cosignature | None]:
    return (0, "", None) if heartbeat is None else (heartbeat.outer_step, heartbeat.digest, heartbeat.cosigned)


def _asks_for_schema(message: object) -> bool:
    return isinstance(message, control_pb2.CoordinatorMessage) and message.WhichOneof("kind") == "schema_request"


async def _first(*waits: Coroutine[Any, Any, object], within_s: float) -> None:
    """Wait until one of `waits` is over, at most `within_s` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
