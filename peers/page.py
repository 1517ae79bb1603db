"""What the page of a run asks of its coordinator, with a member's certificate: statuses as they come."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path

import grpc

from edit.web.serve import Tls, serve_page
from editpb import control_pb2_grpc
from editpb.run_status import RunStatus
from editpb.transport.channel_options import channel_options
from editpb.transport.watch import watch
from peers.identity.peer_folder import PeerFolder

__all__ = ["serve_members_page", "statuses"]


def serve_members_page(
    home: Path, *, listen: str, certificate: Path | None, key: Path | None, say: Callable[[str], None]
) -> None:
    """Serve the page of the run that this folder's member is of, until Ctrl-C or SIGTERM. It has no orders.

    Each connection reads the folder anew, so a certificate that was renewed meanwhile is taken.

    Args:
        certificate, key: what the page's server shows to others than this machine, in PEM; None: only this machine may look.
    """
    folder = PeerFolder(home)
    identity = folder.load(time.time()).identity
    tls = Tls(certificate, key, home / "ca.pem") if certificate is not None and key is not None else None
    serve_page(partial(statuses, folder, itertools.count()), identity, listen=listen, tls=tls, say=say)


async def statuses(folder: PeerFolder, turn: Iterator[int]) -> AsyncGenerator[RunStatus, None]:
    """Yield how the run stands, as `editpb.transport.watch.watch` does. turn: which of the coordinator's addresses is next."""
    enrolled = folder.load(time.time())
    endpoint = enrolled.endpoints[next(turn) % len(enrolled.endpoints)]
    async with grpc.aio.secure_channel(endpoint, enrolled.credentials, options=channel_options(endpoint)) as channel:
        async for status in watch(control_pb2_grpc.ControlStub(channel), f"the coordinator at {endpoint}"):
            yield status
