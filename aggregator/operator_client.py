"""What the commands ask of a running coordinator and of the further aggregators: the operator's side of Control."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Set
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from cryptography import x509

from aggregator.storage.configurations import configurations_of
from aggregator.storage.state_folder import StateFolder
from edit.durable_files import read_private
from edit.errors import (
    ConfigError,
    EditError,
    RefusedError,
    RemoteProtocolError,
    RemoteStorageError,
    StorageError,
    TransportError,
)
from edit.plain_text import quoted
from editpb import control_pb2 as pb
from editpb import control_pb2_grpc
from editpb.identity import check_member
from editpb.limits import MAX_TEXT_CHARS, one_line
from editpb.messages import RunPhase
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb
from editpb.transport.channel_options import channel_options
from editpb.transport.status import from_status, handshake_refusal
from editpb.transport.watch import watch
from editpb.transport.whole_hub import HubWatch
from editpb.validity import Notice, Validity

__all__ = [
    "Answers",
    "ask_every",
    "ask_operator",
    "call_every",
    "call_operator",
    "connect",
    "drain_every",
    "drain_run",
    "evict_peer",
    "further_addresses",
    "pause_run",
    "read_status",
    "resume_run",
    "watch_run",
]

_T = TypeVar("_T")
_TIMEOUT_S = 20.0
_AHEAD_S = 2.0  # for the coordinator's answer to a drain, before the others are asked


def connect(folder: StateFolder) -> grpc.aio.Channel:
    """Return a channel to this folder's coordinator, as its operator. Raises ConfigError when none was ever started here."""
    if not (bound := folder.bound()):
        raise ConfigError(
            f"{folder.path}: no coordinator was started here; run: edit-coordinator serve --state {quoted(folder.path)}"
        )
    name = folder.config().server.advertise[0]  # stands in the server's certificate, whatever address it listens on
    return grpc.aio.secure_channel(
        bound["listen"], _credentials(folder.path), options=channel_options(bound["listen"], server_name=name)
    )


def _credentials(path: Path) -> grpc.ChannelCredentials:
    try:
        key = read_private(path / "operator.key")
        ca, certificate = ((path / name).read_bytes() for name in ("ca.pem", "operator.pem"))
        validity = Validity.of(x509.load_pem_x509_certificate(certificate))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); only the run's operator may do this"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path / 'operator.pem'}: is damaged; restore it from a copy") from error
    if (notice := validity.notice(now := time.time())) in (Notice.EXPIRED, Notice.NOT_YET):
        mend = "`edit-coordinator serve` renews it: start it again" if notice is Notice.EXPIRED else "set the clock"
        raise ConfigError(f"{path / 'operator.pem'}: {validity.text(now)}; {mend}")
    return grpc.ssl_channel_credentials(ca, key, certificate)


def further_addresses(folder: StateFolder) -> tuple[str, ...]:
    """Return where the run's further aggregators are, by the configuration in force. Raises ConfigError, StorageError.

    Without any in run.toml the audit log is not read: a run whose changes need approvals has none.
    """
    written = folder.config().aggregators.addresses
    return configurations_of(folder).config.aggregators.addresses if written else ()


def _connect_further(folder: StateFolder, address: str) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, _credentials(folder.path), options=channel_options(address))


@dataclass(frozen=True, slots=True)
class Answers(Generic[_T]):
    """What the aggregators answered."""

    said: dict[int, _T]  # by the aggregator's number; 0 is the coordinator
    failures: list[str]  # one line for each that did not answer, or refused

    def check(self) -> None:
        """Raise TransportError with the failures, if there are any."""
        if self.failures:
            raise TransportError(f"{'; '.join(self.failures)}; repeat the command when they are back, the others have done it")


def call_every(folder: StateFolder, call: Callable[[Any], Awaitable[_T]]) -> Answers[_T]:
    """Run one call at every aggregator of the run. Raises what the coordinator's refusal means; then no other was asked.

    With one aggregator it raises what `call_operator` raises.
    """
    return asyncio.run(ask_every(folder, call))


async def ask_every(folder: StateFolder, call: Callable[[Any], Awaitable[_T]]) -> Answers[_T]:
    """As `call_every`, on the loop that runs."""
    further = range(1, 1 + len(further_addresses(folder)))
    if not further:
        return Answers({0: await ask_operator(folder, call)}, [])
    return await _ask_in_order(folder, {0, *further}, call)


async def _ask_in_order(
    folder: StateFolder, numbers: Set[int], call: Callable[[Any], Awaitable[_T]], first_s: float | None = None
) -> Answers[_T]:
    """Run one call at these aggregators: the coordinator first, then the others at the same time.

    first_s: how long the others wait for the coordinator's answer; None: until it has answered, or the call has timed out.

    Raises what the coordinator's refusal means: where it came in that time, no other was asked.
    """
    addresses = further_addresses(folder)
    said: dict[int, _T] = {}
    failures: dict[int, str] = {}
    refusals: list[EditError] = []  # of the coordinator

    async def ask_coordinator() -> None:
        try:
            said[0] = await ask_operator(folder, call)
        except TransportError as error:
            failures[0] = str(error)
        except EditError as error:
            refusals.append(error)

    async def ask_further(number: int, address: str) -> None:
        who = f"aggregator {number} ({address})"
        try:
            said[number] = await _ask(partial(_connect_further, folder, address), call, who)
        except EditError as error:
            why = str(error)
            failures[number] = why if why.startswith(who) else f"{who}: {why}"

    first = [asyncio.ensure_future(ask_coordinator())] if 0 in numbers else []
    if first:
        await asyncio.wait(first, timeout=first_s)
    others = (ask_further(number, addresses[number - 1]) for number in sorted(numbers - {0}))
    if not refusals:
        await asyncio.gather(*first, *others)
    if refusals:
        raise refusals[0]
    return Answers(dict(sorted(said.items())), [failures[number] for number in sorted(failures)])


def call_operator(folder: StateFolder, call: Callable[[Any], Awaitable[_T]]) -> _T:
    """Run one call at the coordinator, and return its answer.

    Raises TransportError when it does not answer, StorageError when its disk refuses, and what else its refusal means.
    """
    return asyncio.run(ask_operator(folder, call))


async def ask_operator(folder: StateFolder, call: Callable[[Any], Awaitable[_T]]) -> _T:
    """As `call_operator`, on the loop that runs."""
    return await _ask(lambda: connect(folder), call, f"{folder.path}: the coordinator")


async def _ask(connection: Callable[[], grpc.aio.Channel], call: Callable[[Any], Awaitable[_T]], who: str) -> _T:
    async with connection() as channel:
        try:
            return await call(control_pb2_grpc.ControlStub(channel))
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{who}: {error}") from error
        except grpc.aio.AioRpcError as error:
            if (stranger := handshake_refusal(error.details() or "")) is not None:
                raise RefusedError(f"{who}: {stranger}") from error
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise TransportError(f"{who} does not answer; is `serve` running?") from error
            meant = from_status(error.code(), error.details() or "")
            raise StorageError(str(meant)) if isinstance(meant, RemoteStorageError) else meant from error


async def read_status(stub: Any) -> RunStatus:
    """Return how the run of this aggregator stands."""
    return status_from_pb(await stub.Status(pb.StatusRequest(), timeout=_TIMEOUT_S))


async def watch_run(folder: StateFolder, every_s: float = 1.0) -> AsyncGenerator[RunStatus, None]:
    """Yield how the run of this folder stands, of all its aggregators, again and again.

    Raises as `editpb.transport.watch.watch` of the coordinator. A further aggregator that does not answer is named in the
    status.
    """

    async def told(channel: Callable[[], grpc.aio.Channel], who: str) -> AsyncGenerator[RunStatus, None]:
        async with channel() as open_, aclosing(watch(control_pb2_grpc.ControlStub(open_), who, every_s)) as statuses:
            async for status in statuses:
                yield status

    further = tuple(
        partial(told, partial(_connect_further, folder, address), f"aggregator {number} ({address})")
        for number, address in enumerate(further_addresses(folder), start=1)
    )
    watching = HubWatch(partial(told, partial(connect, folder), f"{folder.path}: the coordinator"), lambda status: further)
    async with aclosing(watching.statuses()) as statuses:
        async for status in statuses:
            yield status


async def pause_run(stub: Any) -> None:
    """Open no further round until `resume_run`."""
    await stub.Pause(pb.PauseRequest(), timeout=_TIMEOUT_S)


async def resume_run(stub: Any) -> None:
    """Go on after `pause_run` or `drain_run`."""
    await stub.Resume(pb.ResumeRequest(), timeout=_TIMEOUT_S)


async def drain_run(stub: Any, outer_step: int = 0) -> int | None:
    """Finish the run at an outer step; 0: with the open round. Return the one at which it will end; None: it does not say."""
    reply: pb.DrainReply = await stub.Drain(pb.DrainRequest(outer_step=outer_step), timeout=_TIMEOUT_S)
    return reply.outer_step if reply.HasField("outer_step") else None


async def drain_every(folder: StateFolder) -> Answers[int | None]:
    """Finish the run at one outer step of all its aggregators, and return where each will end (`drain_run`).

    It is the one after that which the open round of the furthest leads to, so that none has ended before all have been asked;
    where no round is open, the furthest one's last. An aggregator that is behind opens further rounds until it is there, or
    until one commits nothing. Those that did not say where they are, are asked last. Raises as `ask_every`.
    """
    if not further_addresses(folder):
        return await ask_every(folder, drain_run)
    statuses = await ask_every(folder, read_status)
    outer_step = max(map(_earliest_end, statuses.said.values()), default=0)
    answers = await _ask_in_order(folder, statuses.said.keys(), partial(drain_run, outer_step=outer_step), _AHEAD_S)
    ends = {end for end in answers.said.values() if end is not None}
    if len(ends) > 1:  # one went on in between
        answers = await _ask_in_order(folder, statuses.said.keys(), partial(drain_run, outer_step=max(ends)), _AHEAD_S)
    silent = set(range(1 + len(further_addresses(folder)))) - statuses.said.keys()
    late = await _ask_in_order(folder, silent, partial(drain_run, outer_step=max(ends, default=outer_step)))
    return Answers(dict(sorted((answers.said | late.said).items())), [*answers.failures, *late.failures])


def _earliest_end(status: RunStatus) -> int:
    """Return the outer step at which this aggregator can end at the earliest, when the others still are to be asked.

    Where it drains already, it is where it ends: whoever repeats the command moves no end.
    """
    if status.draining and status.last_step:
        return status.last_step
    return status.outer_step + 2 * (status.phase in (RunPhase.COLLECTING.value, RunPhase.COMMITTING.value))


def evict_peer(peer_id: str, reason: str) -> Callable[[Any], Awaitable[None]]:
    """Return the call that evicts this peer. Raises ConfigError: no member can have this name, or the reason is too long."""
    check_member(peer_id)
    if len(reason) > MAX_TEXT_CHARS:
        raise ConfigError(f"the reason has {len(reason)} characters, more than {MAX_TEXT_CHARS}")

    async def call(stub: Any) -> None:
        await stub.Evict(pb.EvictRequest(peer_id=peer_id, reason=one_line(reason)), timeout=_TIMEOUT_S)

    return call
