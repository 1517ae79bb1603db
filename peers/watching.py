"""What `status`, `watch` and the page ask of all aggregators, with the certificate of any member, or of who only looks on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import grpc

from edit.errors import TransportError
from editpb import control_pb2_grpc
from editpb.run_status import RunStatus
from editpb.transport.channel_options import CONNECT_MS, attempts, channel_options, connect_ms
from editpb.transport.http_proxy import through
from editpb.transport.status import StrangerError, none_answered
from editpb.transport.watch import watch
from editpb.transport.whole_hub import HubWatch, Statuses, further_aggregators
from peers.carriers.hub.channels import Channels
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal

__all__ = ["reached", "read_status", "status_reader", "statuses"]


async def statuses(folder: PeerFolder, turn: Iterator[int], every_s: float = 1.0) -> AsyncGenerator[RunStatus, None]:
    """Yield how the whole run stands, as `HubWatch` does; connect with the certificate that is there now.

    Meanwhile the certificate of an observer or an operator is kept renewed, as `edit-peer run` does that of a peer.

    turn: which of the coordinator's addresses is asked, by its number. Raises ConfigError where nobody joined a run.
    """
    enrolled = folder.load(time.time())
    number, known = next(turn), len(enrolled.endpoints)
    endpoint, within_ms = enrolled.endpoints[number % known], connect_ms(number, known)

    def further(coordinator: RunStatus) -> list[Statuses]:
        return [
            partial(_of_one, folder, address, f"aggregator {number} ({address}){through(address)}", every_s, CONNECT_MS)
            for number, address in enumerate(further_aggregators(coordinator), start=1)
        ]

    coordinator = partial(_of_one, folder, endpoint, f"the coordinator at {endpoint}{through(endpoint)}", every_s, within_ms)
    watching = HubWatch(coordinator, further)
    async with _renewed(folder, enrolled), aclosing(watching.statuses()) as told:
        async for status in told:
            yield status


async def _of_one(
    folder: PeerFolder, address: str, who: str, every_s: float, within_ms: int
) -> AsyncGenerator[RunStatus, None]:
    """Yield what one aggregator says of its share. within_ms: how long connecting may take."""
    credentials, options = folder.load(time.time()).credentials, channel_options(address, within_ms=within_ms)
    async with (
        grpc.aio.secure_channel(address, credentials, options=options) as channel,
        aclosing(watch(control_pb2_grpc.ControlStub(channel), who, every_s)) as told,
    ):
        async for status in told:
            yield status


@contextlib.asynccontextmanager
async def _renewed(folder: PeerFolder, enrolled: Enrolment) -> AsyncIterator[None]:
    """Keep the certificate renewed of a member for whom nothing else does: one that only looks on."""
    if enrolled.identity.role not in ("observer", "scorer", "operator"):
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


def status_reader(folder: PeerFolder) -> Callable[[], RunStatus]:
    """Return what reads how the whole run stands, as `read_status`, again and again.

    A coordinator that took the last outer step, and then does not answer, has ended with its run.
    """
    last: RunStatus | None = None

    def read() -> RunStatus:
        nonlocal last
        try:
            last = asyncio.run(read_status(folder))
        except TransportError:
            if last is None or not last.at_its_end:
                raise
            last = replace(last, phase="finished", waiting_for="", reason=f"the run has ended at outer step {last.outer_step}")
        return last

    return read


async def read_status(folder: PeerFolder) -> RunStatus:
    """Return how the whole run stands. Raises as `reached`."""
    async with aclosing(reached(folder, itertools.count())) as told:
        return await anext(told)


async def reached(folder: PeerFolder, turn: Iterator[int], every_s: float = 1.0) -> AsyncGenerator[RunStatus, None]:
    """Yield as `statuses`, from the first of the coordinator's addresses that answers, from the next one on.

    Raises TransportError when none answers, or that one no longer; RefusedError when all of them are a stranger's; and as
    `statuses`.
    """
    failures: dict[str, bool] = {}  # and whether it is a stranger's
    for _ in attempts(len(folder.load(time.time()).endpoints)):
        answered = False
        try:
            async with aclosing(statuses(folder, turn, every_s)) as told:
                async for status in told:
                    answered = True
                    yield status
        except (TransportError, StrangerError) as error:
            if answered:
                raise
            failures[str(error)] = isinstance(error, StrangerError)
        else:
            if answered:
                return
            failures["the coordinator ended the call"] = False
    raise none_answered(failures.items())
