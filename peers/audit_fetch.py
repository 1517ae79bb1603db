"""`edit-peer audit fetch`: an auditor's copy of a run's audit log, and of what merging an outer step once more takes.

The log is held to what the auditor knows of it: its key, and the head of the one that was fetched last (`fetched.head`).
"""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from edit.durable_files import make_folder, write_atomic
from edit.errors import ConfigError, RefusedError, RemoteProtocolError, TransportError
from edit.interrupts import cleaned_up_at_sigterm
from edit.plain_text import parse_json, reason_of
from edit.trust.canonical import MOST_LINE_BYTES
from edit.trust.checkpoints import MOST_NOTE_BYTES, Checkpoint, NoteKey, open_note, parse_checkpoint
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb import audit_pb2 as pb
from editpb import audit_pb2_grpc
from editpb.audit_log import log_origin
from editpb.invitation import is_endpoint
from editpb.limits import MAX_AUDIT_FILES, MAX_BYTES, at_most, fail, one_line, within
from editpb.receipts import ReceiptFault
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels, first_answer
from peers.carriers.hub.kept_receipts import FETCHED, KEY, kept_of, kept_places, pinned_key
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal

__all__ = ["Fetched", "aggregators_in_log", "fetch"]

_LOG, _HEAD, _KEY = "audit-log.jsonl", "audit-log.head", "audit-log.key"
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")  # of a further aggregator
_STALL_S = 60.0  # without a message
_NAME = re.compile(
    r"audit-log\.(?:jsonl|head|key|cosigned/[A-Za-z0-9][A-Za-z0-9._-]{0,80})|ca\.pem|run\.(?:json|toml)"
    r"|outer/step-[0-9]{1,20}\.(?:safetensors|journal)|contributions/step-[0-9]{1,20}/fragment-[0-9]{1,10}"
)


class Fetched(NamedTuple):
    """What was fetched."""

    files: int
    bytes: int
    key: str  # of the log, as the auditor knew it before; '': this log is the first one, and its key is its own word


def fetch(home: Path, out: Path, step: int, now: float, aggregator: str = "") -> Fetched:
    """Fetch to a new folder. step: see `AuditRequest`. now: unix seconds.

    aggregator: HOST:PORT of a further aggregator, whose log is asked for; empty: the coordinator's.

    A certificate that ends soon is renewed first: nothing else of an auditor runs that would. The folder appears once it is
    whole, and stays as evidence where the log in it is not the one that the auditor knows: RefusedError for another key,
    ReceiptFault for another log. Raises also ConfigError, RefusedError (another role, a step that is not kept),
    RemoteProtocolError, StorageError, TransportError.
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
    known = {place: _known(place) for place in kept_places(home)}  # before the log is asked for, which must go on from there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            cleaned_up_at_sigterm(),
            tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder,
        ):
            whole = Path(folder) / "whole"
            whole.mkdir(mode=0o700)
            files, size = _from_any(enrolled, (aggregator,) if aggregator else enrolled.endpoints, whole, step)
            whole.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        return Fetched(files, size, _hold(home, out, enrolled.run_id, known, further=bool(aggregator)))
    except RefusedError as error:
        raise type(error)(f"{out}: {error}") from error


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


def _known(place: Path) -> tuple[str, Checkpoint | None]:
    """Return the key of a log as it is kept, and the head of the log that was fetched last; '' and None where there is none.

    Raises ConfigError for damage.
    """
    key, head = place / KEY, place / FETCHED
    try:
        text = key.read_text().strip() if key.exists() else ""
        if not text and head.exists():
            raise ConfigError(
                f"{head}: is here without the key of its log, {KEY}; restore that from a copy. If the operator has begun "
                "another log, and you accept that, move this file away, too"
            )
        return text, _head_of(head.read_bytes(), NoteKey.parse(text)) if head.exists() else None
    except OSError as error:
        raise ConfigError(f"{place}: its {KEY} or {FETCHED} cannot be read ({reason_of(error)})") from error
    except ValueError as error:
        raise ConfigError(f"{head}: cannot be verified with {KEY} ({error}); restore both from a copy") from error


def _head_of(note: bytes, key: NoteKey) -> Checkpoint:
    """Return the head in a note that a log has signed. Raises ValueError."""
    head = parse_checkpoint(open_note(note, [key])[0])
    if head.origin != key.name:
        raise ValueError(f"it is of the log {head.origin}, not of {key.name}")
    return head


def _hold(home: Path, out: Path, run_id: str, known: Mapping[Path, tuple[str, Checkpoint | None]], *, further: bool) -> str:
    """Hold the log that came to what is known of it, and keep its key and its head; return the key as it was known.

    known: by the folder where it is kept, `_known`. further: of a further aggregator. Raises RefusedError for another key,
    ReceiptFault for another log, RemoteProtocolError, StorageError.
    """
    try:
        said = (out / _KEY).read_text().strip()
        with (out / _HEAD).open("rb") as file:
            note = file.read(MOST_NOTE_BYTES + 1)
        number = said.partition("+")[0].removeprefix(f"{log_origin(run_id)}/")
        aggregator = int(number) if further and _NUMBER.fullmatch(number) else 0
        place = kept_of(home, aggregator)
        make_folder(place, 0o700)
        key = pinned_key(place, said, log_origin(run_id, aggregator))
        try:
            head = _head_of(note, key)
        except ValueError as error:
            raise ReceiptFault(one_line(f"the head of the log: {error}")) from error
        tree = _tree_of(out / _LOG, head.size)
    except (OSError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"{out}: is no whole audit log ({reason_of(error)})") from error
    if len(tree) != head.size or tree.root() != head.root:
        raise ReceiptFault("the head of the log is signed for other entries than the log has")
    before, kept = known.get(place, ("", None)), place / FETCHED
    if (last := before[1]) is not None and (last.size > head.size or tree.root(last.size) != last.root):
        raise ReceiptFault(
            f"this log of {head.size} entries does not begin with the {last.size} that were fetched before; their head, "
            f"signed with the same key, is in {kept}. Show both to the members. If the operator has restored an older copy of "
            "the run, and you accept that, remove that file, and fetch again"
        )
    if (latest := _known(place)[1]) is None or latest.size < head.size:
        write_atomic(kept, note)
    return before[0]


def _tree_of(path: Path, size: int) -> MerkleTree:
    """Return the tree of the first entries of a log, fewer where it has fewer. Raises OSError."""
    tree = MerkleTree()
    with path.open("rb") as file:
        while len(tree) < size and (line := file.readline(MOST_LINE_BYTES + 2)).endswith(b"\n"):
            tree.append(leaf_hash(line[:-1]))
    return tree


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
