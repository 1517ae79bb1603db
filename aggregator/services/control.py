"""The Control service of control.proto: one stream per rank of a peer, and the operator's calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aggregator.control.attendance import Attendance
from aggregator.control.run import Run
from aggregator.security.certificates import certified_key
from aggregator.services.authorization import Authorizer
from aggregator.services.readers import send
from aggregator.services.status_replies import StatusReplies
from aggregator.services.watching import Watchers
from edit.errors import EditError, EvictedError, RefusedError, RemoteProtocolError, TransportError
from editpb import control_pb2 as cpb
from editpb.control_messages import coordinator_message_to_pb, evict_request_from_pb, peer_message_from_pb
from editpb.identity import Identity
from editpb.messages import Consent, Expel, Goodbye, Heartbeat, Hello, SchemaRequest, Welcome
from editpb.transport.abort_on_error import abort_on_error

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["ControlService"]

_HELLO_S = 30.0  # an Attend stream whose first message, or whose schema, takes longer is closed
_WATCHERS = ("operator", "observer", "scorer", "peer", "region")
_NO_CONSENT = (
    "its site has not consented to the run's configuration, which this run asks for (membership.consent): "
    "run `edit-peer consent`, then start the peer again"
)
_REFUSED_S = 5.0  # how long a refused client may take over its first message before it hears why


class ControlService:
    """Control of control.proto. Every call first authorizes its caller; an error that it raises is the status of the call."""

    def __init__(self, run: Run, authorizer: Authorizer) -> None:
        self._run, self._authorizer = run, authorizer
        self._replies = StatusReplies(run)
        self._watchers = Watchers(run, self._replies)

    async def Attend(self, messages: AsyncIterator[cpb.PeerMessage], context: Context) -> AsyncIterator[cpb.CoordinatorMessage]:
        """A peer's stream: Hello, then heartbeats up; Welcome, then views down, one whenever something changed."""
        async with abort_on_error(context):
            try:
                identity = self._authorizer.authorize(context, "peer", "region", "scorer")
            except (EvictedError, RefusedError) as error:
                await _discard_first(messages)  # a client whose write fails does not read the reason
                yield _expel(error)
                return
            try:
                hello = await self._hello(identity, messages)
                attendance = None  # without a schema: who only asks for the configuration, or a regional aggregator
                if hello.schema_hash:
                    if identity.role == "scorer":
                        raise RefusedError("a scorer takes no part in the rounds; start it with `edit-peer score`")
                    if identity.role == "region":
                        raise RefusedError(
                            "a regional aggregator takes no part in the rounds here; start it with `edit-peer region`"
                        )
                    schema = self._run.schemas.known(hello.schema_hash)
                    if schema is None:
                        yield coordinator_message_to_pb(SchemaRequest())
                        answer = (await _next(messages, "the answer to SchemaRequest must be a schema")).schema
                        schema = await self._run.schemas.learn(identity.peer_id, hello.schema_hash, answer)
                    expires = self._authorizer.expires(context, identity.peer_id)
                    attendance = self._run.attend(identity.peer_id, schema, hello.rank, hello.ranks, expires)
            except (EvictedError, RefusedError) as error:
                yield _expel(error)
                return
            yield coordinator_message_to_pb(self._welcome(identity, hello))
            if attendance is not None:
                certified = certified_key(self._authorizer.certificate(context))
                async for message in self._converse(attendance, messages, certified):
                    yield message

    async def _hello(self, identity: Identity, messages: AsyncIterator[cpb.PeerMessage]) -> Hello:
        """Return the first message. Raises RemoteProtocolError (also for another protocol), RefusedError (another run)."""
        first = await _next(messages, "the first message must be Hello")
        try:
            hello = peer_message_from_pb(first)
        except RemoteProtocolError as error:
            self._run.not_understood(identity.peer_id, str(error))
            raise
        if not isinstance(hello, Hello):
            raise RemoteProtocolError("the first message must be Hello")
        self._run.check_run_id(hello.run_id)
        return hello

    def _welcome(self, identity: Identity, hello: Hello) -> Welcome:
        run = self._run
        configuration, changes = run.told(hello.configuration)
        outer_step = run.rounds.published.outer_step if run.founded else 0
        return Welcome(
            run_id=run.run_id,
            peer_id=identity.peer_id,
            config_json=run.config.to_json(),
            outer_step=outer_step,
            first_round_id=run.first_round_id,
            log_key=run.log_key,
            configuration=configuration,
            changes=changes,
        )

    async def _converse(
        self, attendance: Attendance, messages: AsyncIterator[cpb.PeerMessage], certified: bytes
    ) -> AsyncIterator[cpb.CoordinatorMessage]:
        """Send a view whenever something changed, until the peer leaves, is expelled, or the coordinator stops.

        certified: the public key of its certificate, DER.
        """
        listening = asyncio.get_running_loop().create_task(self._listen(attendance, messages, certified))
        listening.add_done_callback(lambda _: attendance.changed.set())
        try:
            while attendance.expelled is None and not attendance.over and not listening.done():
                attendance.changed.clear()
                yield coordinator_message_to_pb(self._run.view(attendance))
                await attendance.changed.wait()
            if isinstance(attendance.expelled, TransportError):
                raise attendance.expelled
            if (refused := attendance.expelled or _refusal(listening)) is not None:
                yield _expel(refused)
        finally:
            fault = _fault(listening)
            ended = listening.done() and not listening.cancelled()
            goodbye = listening.result() if ended and fault is None else ""
            listening.cancel()
            reason = goodbye or (str(fault) if isinstance(fault, EditError) else "the connection broke")
            self._run.leave(attendance, reason, polite=bool(goodbye))
        if fault is not None and not isinstance(fault, RefusedError):  # who is refused was told so
            raise fault

    async def _listen(self, attendance: Attendance, messages: AsyncIterator[cpb.PeerMessage], certified: bytes) -> str:
        """Take heartbeats until the stream ends; return the reason of a goodbye, or ''.

        Raises RemoteProtocolError; RefusedError where the run asks for its site's consent, and it reports without one.
        """
        consented = not self._run.config.membership.consent or attendance.rank != 0
        async for message in messages:
            match peer_message_from_pb(message):
                case Goodbye(reason):
                    return reason or "goodbye"
                case Heartbeat() as heartbeat:
                    if not consented:
                        self._run.lacks_consent(attendance.peer_id)
                        raise RefusedError(_NO_CONSENT)
                    if heartbeat.cosigned is not None and attendance.rank == 0:
                        self._run.cosigned(attendance.peer_id, certified, heartbeat.cosigned)
                    self._run.heartbeat(attendance, replace(heartbeat, cosigned=None))
                case Consent() as consent:
                    if consent.public_key != certified:
                        raise RemoteProtocolError("a consent is signed with another key than the certificate's")
                    self._run.consented(attendance.peer_id, consent)
                    consented = True
                case Hello():
                    raise RemoteProtocolError("Hello is said once")
        return ""

    async def Status(self, request: cpb.StatusRequest, context: Context) -> cpb.StatusReply:
        """Return how the run stands."""
        async with abort_on_error(context):
            identity = self._looks_on(context, "operator", "observer")
            return self._replies.now(identity, request.rounds_after, brief=request.brief)
        raise AssertionError("unreachable: abort raises")

    async def Watch(self, request: cpb.WatchRequest, context: Context) -> None:
        """Send how the run stands, again and again, until the caller ends it. Who reads nothing for long is cut off."""
        async with abort_on_error(context):
            with self._watchers.place(self._authorizer.authorize(context, *_WATCHERS)):
                await send(context.write, self.statuses(request.every_s, context, curves_kept=request.curves_kept))

    def statuses(self, every_s: float, context: Context, *, curves_kept: bool = False) -> AsyncGenerator[cpb.StatusReply, None]:
        """Return the messages of Watch, which authorize the caller again before each of them."""
        authorize = partial(self._looks_on, context, *_WATCHERS)
        return self._watchers.statuses(every_s, authorize, curves_kept=curves_kept)

    def _looks_on(self, context: Context, *roles: str) -> Identity:
        """Authorize who asks how the run stands, and note that somebody does."""
        identity = self._authorizer.authorize(context, *roles)
        self._run.looked_at = self._run.clock.monotonic()
        return identity

    async def Evict(self, request: cpb.EvictRequest, context: Context) -> cpb.EvictReply:
        """Shut a member out for good."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, "operator")
            self._run.evict(*evict_request_from_pb(request))
        return cpb.EvictReply()

    async def Pause(self, request: cpb.PauseRequest, context: Context) -> cpb.PauseReply:
        """Open no rounds until Resume. Refused while the run drains: its open round is to come to its end."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, "operator")
            if self._run.draining:
                raise RefusedError("the run drains; resume it first, or wait until it has finished")
            self._run.pause()
        return cpb.PauseReply()

    async def Resume(self, request: cpb.ResumeRequest, context: Context) -> cpb.ResumeReply:
        """Open rounds again, after Pause or Drain."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, "operator")
            self._run.resume()
        return cpb.ResumeReply()

    async def Drain(self, request: cpb.DrainRequest, context: Context) -> cpb.DrainReply:
        """Finish the run with the open round, or at the outer step that is asked for."""
        async with abort_on_error(context):
            self._authorizer.authorize(context, "operator")
            ends = self._run.drain(request.outer_step)
        return cpb.DrainReply(outer_step=ends)


async def _next(messages: AsyncIterator[cpb.PeerMessage], otherwise: str) -> cpb.PeerMessage:
    """Return the next message. Raises RemoteProtocolError(otherwise) when it does not come in time."""
    try:
        return await asyncio.wait_for(anext(messages), _HELLO_S)
    except (TimeoutError, StopAsyncIteration):
        raise RemoteProtocolError(otherwise) from None


async def _discard_first(messages: AsyncIterator[cpb.PeerMessage]) -> None:
    """Let the first message of a refused client arrive, unread."""
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        await asyncio.wait_for(anext(messages), _REFUSED_S)


def _fault(listening: asyncio.Task[str]) -> BaseException | None:
    """Return what ended the reading of a stream; None: it goes on, was cancelled, or the stream ended."""
    return listening.exception() if listening.done() and not listening.cancelled() else None


def _refusal(listening: asyncio.Task[str]) -> RefusedError | None:
    fault = _fault(listening)
    return fault if isinstance(fault, RefusedError) else None


def _expel(error: EvictedError | RefusedError) -> cpb.CoordinatorMessage:
    return coordinator_message_to_pb(Expel(evicted=isinstance(error, EvictedError), reason=str(error)))
