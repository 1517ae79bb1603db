"""What `status` and `watch` ask of the coordinator, with the certificate of any member: an observer, an operator, a peer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

import grpc

from edit.errors import TransportError
from editpb import control_pb2_grpc
from editpb.run_status import RunStatus
from editpb.transport.channel_options import channel_options
from editpb.transport.watch import watch
from peers.carriers.hub.channels import Channels
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal

__all__ = ["read_status", "statuses"]


async def statuses(folder: PeerFolder, turn: Iterator[int], every_s: float = 1.0) -> AsyncGenerator[RunStatus, None]:
    """Yield how the run stands, as `editpb.transport.watch.watch` does; connect with the certificate that is there now.

    Meanwhile the certificate of an observer or an operator is kept renewed, as `edit-peer run` does that of a peer.

    turn: which of the coordinator's addresses is asked, by its number. Raises ConfigError where nobody joined a run.
    """
    enrolled = folder.load(time.time())
    endpoint = enrolled.endpoints[next(turn) % len(enrolled.endpoints)]
    async with (
        _renewed(folder, enrolled),
        grpc.aio.secure_channel(endpoint, enrolled.credentials, options=channel_options(endpoint)) as channel,
    ):
        who = f"the coordinator at {endpoint}"
        async with aclosing(watch(control_pb2_grpc.ControlStub(channel), who, every_s)) as told:
            async for status in told:
                yield status


@contextlib.asynccontextmanager
async def _renewed(folder: PeerFolder, enrolled: Enrolment) -> AsyncIterator[None]:
    """Keep the certificate renewed of a member for whom nothing else does: one that only looks on."""
    if enrolled.identity.role not in ("observer", "operator"):
        yield
        return
    channels = Channels(enrolled.endpoints, enrolled.credentials)
    keeping = asyncio.create_task(Renewal(folder, enrolled, channels).keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await channels.close()


async def read_status(folder: PeerFolder) -> RunStatus:
    """Return how the run stands; ask all of the coordinator's addresses, one after the other.

    Raises TransportError when none answers, and as `statuses`.
    """
    turn, failures = itertools.count(), list[str]()
    for _ in range(len(folder.load(time.time()).endpoints)):
        try:
            async with aclosing(statuses(folder, turn)) as told:
                return await anext(told)
        except TransportError as error:
            failures.append(str(error))
        except StopAsyncIteration:
            failures.append("the coordinator ended the call")
    raise TransportError("; ".join(failures))
