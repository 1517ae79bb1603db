"""`edit-peer audit fetch`: an auditor's copy of a run's audit log, and of what merging an outer step once more takes."""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from edit.errors import ConfigError, RemoteProtocolError, TransportError
from edit.interrupts import cleaned_up_at_sigterm
from edit.plain_text import parse_json
from editpb import audit_pb2 as pb
from editpb import audit_pb2_grpc
from editpb.invitation import is_endpoint
from editpb.limits import MAX_AUDIT_FILES, MAX_BYTES, at_most, fail, within
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels, first_answer
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal

__all__ = ["aggregators_in_log", "fetch"]

_STALL_S = 60.0  # without a message
_NAME = re.compile(
    r"audit-log\.(?:jsonl|head|key|cosigned/[A-Za-z0-9][A-Za-z0-9._-]{0,80})|ca\.pem|run\.(?:json|toml)"
    r"|outer/step-[0-9]{1,20}\.(?:safetensors|journal)|contributions/step-[0-9]{1,20}/fragment-[0-9]{1,10}"
)


def fetch(home: Path, out: Path, step: int, now: float, aggregator: str = "") -> tuple[int, int]:
    """Fetch to a new folder; return how many files, and bytes. step: see `AuditRequest`. now: unix seconds.

    aggregator: HOST:PORT of a further aggregator, whose log is asked for; empty: the coordinator's.

    A certificate that ends soon is renewed first: nothing else of an auditor runs that would. The folder appears once it is
    whole. Raises ConfigError, RefusedError (another role, a step that is not kept), RemoteProtocolError, TransportError.
    """
    enrolled = PeerFolder(home).load(now)
    if enrolled.identity.role != "auditor":
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; fetching needs an invitation with role auditor")
    if aggregator and not is_endpoint(aggregator):
        raise ConfigError(f"--aggregator {aggregator}: is not HOST:PORT")
    if out.exists():
        raise ConfigError(f"{out}: exists; name a new folder")
    if enrolled.validity.renewal_due(now):
        enrolled = asyncio.run(_renewed(PeerFolder(home), enrolled, now))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            cleaned_up_at_sigterm(),
            tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder,
        ):
            whole = Path(folder) / "whole"
            whole.mkdir(mode=0o700)
            found = _from_any(enrolled, (aggregator,) if aggregator else enrolled.endpoints, whole, step)
            whole.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    return found


def aggregators_in_log(out: Path) -> list[str]:
    """Return HOST:PORT of the run's further aggregators by a fetched log, which was not verified; [] where it says none."""
    found: list[str] = []
    try:
        with (out / "audit-log.jsonl").open("rb") as file:
            for line in file:
                if b'"config":' in line:
                    found = list(parse_json(parse_json(line)["config"])["aggregators"]["addresses"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [each for each in found if isinstance(each, str) and is_endpoint(each)]


async def _renewed(folder: PeerFolder, enrolled: Enrolment, now: float) -> Enrolment:
    """Ask for a new certificate once, and return what lies in the folder then. That it failed is logged."""
    channels = Channels(enrolled.endpoints, enrolled.credentials)
    try:
        await Renewal(folder, enrolled, channels, unix=lambda: now).look()
    finally:
        await channels.close()
    return folder.load(now)


def _from_any(enrolled: Enrolment, endpoints: Sequence[str], out: Path, step: int) -> tuple[int, int]:
    async def over(channel: grpc.aio.Channel) -> tuple[int, int]:
        _empty(out)  # of what an endpoint that broke off has sent
        call = audit_pb2_grpc.AuditStub(channel).Fetch(pb.AuditRequest(run_id=enrolled.run_id, outer_step=step))
        try:
            return await _store(_messages(call), out)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise RemoteProtocolError("its software is too old for auditors") from error
            raise from_rpc(error) from error
        finally:
            call.cancel()

    def who(endpoint: str) -> str:
        return f"the {'coordinator' if endpoint in enrolled.endpoints else 'aggregator'} at {endpoint}"

    return first_answer(endpoints, enrolled.credentials, over, who)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


async def _messages(call: Any) -> AsyncIterator[pb.AuditPart]:
    while True:
        try:
            message = await asyncio.wait_for(call.read(), _STALL_S)
        except TimeoutError:
            raise TransportError(f"nothing came for {_STALL_S:g} s") from None
        if message is grpc.aio.EOF:
            return
        yield message


async def _store(messages: AsyncIterator[pb.AuditPart], out: Path) -> tuple[int, int]:
    """Write the files; return how many, and bytes.

    Raises RemoteProtocolError for other files or bytes than were announced, OSError where they have no room, or cannot be
    written.
    """
    first = await anext(messages, None)
    if first is None or first.WhichOneof("kind") != "files":
        fail("the files of an audit begin with their list")
    files = _listed(first.files)
    total = sum(size for _, size in files)
    if total > (free := shutil.disk_usage(out).free):
        raise OSError(errno.ENOSPC, f"{total:,} bytes are to come, and {free:,} are free")
    rest = memoryview(b"")
    for name, size in files:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while size:
                if not rest:
                    part = await anext(messages, None)
                    if part is None or part.WhichOneof("kind") != "data" or not part.data:
                        fail(f"{name} ends too early")
                    rest = memoryview(part.data)
                now, rest = rest[:size], rest[size:]
                file.write(now)
                size -= len(now)
    if rest or await anext(messages, None) is not None:
        fail("more bytes than the files of the audit have")
    return len(files), total


def _listed(message: pb.AuditFiles) -> list[tuple[str, int]]:
    at_most("files of an audit", message.files, MAX_AUDIT_FILES)
    files = [(each.name, within("bytes", each.bytes, 0, MAX_BYTES)) for each in message.files]
    for name, _ in files:
        if not _NAME.fullmatch(name):
            fail(f"{name[:80]!r} is no file of an audit")
    if len({name for name, _ in files}) != len(files):
        fail("a file of an audit is listed twice")
    return files
