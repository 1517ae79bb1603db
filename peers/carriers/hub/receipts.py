"""The receipts of a peer: each update brings one, which is checked before anything of the update is used, and kept.

    log.vkey              the log's public key: from the invitation, or from the first coordinator that said one
    receipts.jsonl        the head of each receipt that was accepted, with the proof that its log begins with the head before
    receipt-fault.json    a receipt that did not fit: what was seen before, and what came. While it is there the peer does not
                          take part

Rank 0 alone asks for receipts, on the loop's thread. What contributions carry is the head of the last one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from edit.durable_files import sync, write_atomic, write_json
from edit.errors import ConfigError, RefusedError, RemoteProtocolError, StorageError, TransportError
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.checkpoints import NoteKey, open_note, parse_checkpoint
from edit.trust.merkle import leaf_hash, verify_consistency, verify_inclusion
from editpb import data_pb2
from editpb.data_messages import receipt_from_pb
from editpb.limits import one_line
from editpb.messages import ContributionHeader, LogReceipt, SeenHead, UpdateManifest
from editpb.receipts import NOTHING_SEEN, Expected, Head, Mine, ReceiptFault, check_receipt

__all__ = ["FAULT", "KEY", "RECEIPTS", "KeptReceipts", "Receipts", "pinned_key", "verify_kept"]

KEY, RECEIPTS, FAULT = "log.vkey", "receipts.jsonl", "receipt-fault.json"
_FORMAT = 1  # of receipts.jsonl, in each line, and of receipt-fault.json
_MOST_KEPT = 10_000  # lines; then the older half goes
_ROUNDS = 16  # the last ones whose contributions are remembered
_log = logging.getLogger(__name__)


def pinned_key(home: Path, said: str, run_id: str) -> NoteKey:
    """Return the key of the run's log; keep the first one that is said. Raises ConfigError, RefusedError, StorageError."""
    path = home / KEY
    try:
        known = path.read_text().strip() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not said:
        raise RefusedError("the run has audit.enabled, and its coordinator does not say the log's key; its software is too old")
    if known and known != said:
        raise RefusedError(f"{path}: this peer knows another key of the run's audit log than the coordinator says, {said}")
    try:
        key = NoteKey.parse(said)
    except ValueError as error:
        raise RefusedError(f"the coordinator says a key of its audit log that is {error}") from error
    if key.name != f"edit/{run_id}":
        raise RefusedError(f"the coordinator says the key of the log {key.name}, this run's is edit/{run_id}")
    if not known:
        write_atomic(path, said.encode() + b"\n")
    return key


class KeptReceipts:
    """receipts.jsonl, for appending. Make it with `open`; `append` may run in a thread."""

    def __init__(self, path: Path, lines: list[bytes], head: Head, end: int) -> None:
        self.head = head
        self._path, self._lines, self._end = path, lines, end
        self._pending: list[bytes] = []
        self._lock = threading.Lock()  # of `_pending`
        self._told = False

    @classmethod
    def open(cls, home: Path, key: NoteKey) -> KeptReceipts:
        """Read what is kept; a torn last line is passed over. Raises ConfigError where it is damaged."""
        path = home / RECEIPTS
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        end = data.rfind(b"\n") + 1
        lines = data[:end].splitlines()
        head = NOTHING_SEEN
        if lines:
            try:
                head = _head_of(parse_canonical(lines[-1]), key)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: line {len(lines)} is damaged ({error}); restore it from a copy") from error
        return cls(path, lines, head, end)

    def add(self, head: Head, receipt: LogReceipt, outer_step: int) -> None:
        """Take a receipt whose head follows the last one; `write` brings it to the disk."""
        said = {
            "format": _FORMAT,
            "outer_step": outer_step,
            "index": receipt.index,
            "leaf": _text(leaf_hash(receipt.entry)),
            "inclusion": [_text(each) for each in receipt.inclusion],
            "note": receipt.checkpoint,
            "from": self.head.size,
            "consistency": [_text(each) for each in receipt.consistency],
        }
        with self._lock:
            self._pending = [*self._pending, canonical(said)][-_MOST_KEPT:]
        self.head = head

    def write(self) -> None:
        """Append what was taken; it is on disk when this returns. What the disk refuses is tried again with the next."""
        pending = self._pending
        if not pending:
            return
        try:
            if len(self._lines) + len(pending) > _MOST_KEPT:
                self._lines = [*self._lines, *pending][-_MOST_KEPT // 2 :]
                data = b"".join(line + b"\n" for line in self._lines)
                write_atomic(self._path, data)
                self._end = len(data)
            else:
                self._append(b"".join(line + b"\n" for line in pending))
                self._lines += pending
        except (OSError, StorageError) as error:
            if not self._told:
                _log.warning("%s: cannot be written (%s); it is tried again with the next receipt", self._path, error)
            self._told = True
            return
        written = set(pending)
        with self._lock:
            self._pending = [line for line in self._pending if line not in written]
        self._told = False

    def _append(self, data: bytes) -> None:
        new = not self._path.exists()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, self._end)
            rest, at = memoryview(data), self._end
            while rest:
                written = os.pwrite(descriptor, rest, at)
                rest, at = rest[written:], at + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync(self._path.parent)
        self._end += len(data)


@dataclass(slots=True)
class Receipts:
    """What a peer asks of the receipts of its run. On the loop's thread. Make it with `open`."""

    home: Path
    key: NoteKey  # of the log
    run_id: str
    schema_hash: str
    mine: Mine
    members: Mapping[str, str] | None  # hashes of the keys of the members that are known, by name; None: of none
    failed: Callable[[str], object]  # told why the peer must not go on
    kept: KeptReceipts
    position: tuple[int, str] = (-1, "")  # outer step and digest of theta, by the last snapshot or receipt
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def open(
        cls,
        home: Path,
        log_key: str,
        run_id: str,
        schema_hash: str,
        mine: Mine,
        failed: Callable[[str], object],
        members: Mapping[str, str] | None = None,
    ) -> Receipts:
        """Go on from what is kept in a peer's folder. log_key: as the coordinator says it.

        Raises ConfigError (damaged files), RefusedError (another key; an earlier receipt did not fit), StorageError.
        """
        if (path := home / FAULT).exists():
            raise RefusedError(
                f"{path}: a receipt of the audit log did not fit, so this peer does not take part. Show that file to the other "
                f"members; to take part all the same, move it and {home / RECEIPTS} away"
            )
        key = pinned_key(home, log_key, run_id)
        return cls(home, key, run_id, schema_hash, mine, members, failed, KeptReceipts.open(home, key))

    @property
    def head(self) -> Head:
        """The head of the last receipt that was accepted."""
        return self.kept.head

    def seen(self) -> SeenHead | None:
        """Return what contributions carry."""
        return self.head.seen(self.key)

    def at(self, outer_step: int, digest: str) -> None:
        """Note theta as a snapshot has it: the next receipt must begin with it."""
        self.position = outer_step, digest

    def signed(self, header: ContributionHeader) -> ContributionHeader:
        """Note what this peer signs; return it."""
        rounds = {number: dict(each) for number, each in self.mine.signatures.items()}
        of_round = rounds.setdefault(header.round_id, {})
        of_round[header.fragment_id] = (*of_round.get(header.fragment_id, ()), header.signature)[-_ROUNDS:]
        last = sorted(rounds)[-_ROUNDS:]
        self.mine = Mine(self.mine.peer_id, self.mine.public_key, {each: rounds[each] for each in last}, self.mine.delivered)
        return header

    def delivered(self, header: ContributionHeader) -> None:
        """Note that the coordinator has said that it has all of this shard."""
        rounds = frozenset(sorted({*self.mine.delivered, header.round_id})[-_ROUNDS:])
        self.mine = Mine(self.mine.peer_id, self.mine.public_key, self.mine.signatures, rounds)

    def accept(self, manifest: UpdateManifest, message: data_pb2.LogReceipt | None, asked: Head) -> dict[int, str | None]:
        """Check the receipt of an update; return the hashes of the update's bytes by fragment, None of one rolled back.

        message: None: there was none. asked: the head that the request was made with.

        Raises ReceiptFault, after which the peer must not go on; TransportError when another receipt came meanwhile.
        """
        if asked != self.head:
            raise TransportError("the receipt of another update has come meanwhile; this one is asked for again")
        receipt: LogReceipt | None = None
        try:
            if message is None:
                raise ReceiptFault("the update brings no receipt")
            receipt = receipt_from_pb(message)
            step, digest = self.position
            expected = Expected(
                key=self.key,
                run_id=self.run_id,
                schema_hash=self.schema_hash,
                seen=self.head,
                manifest=manifest,
                before=digest if step == manifest.outer_step - 1 else "",
                mine=self.mine,
                members=self.members,
            )
            head, entry = check_receipt(receipt, expected)
        except (ReceiptFault, RemoteProtocolError) as error:
            self.fault(manifest, str(error), receipt)
        self.kept.add(head, receipt, manifest.outer_step)
        self.position = manifest.outer_step, manifest.digest
        return {one["fragment"]: one["update"] for one in entry["fragments"]}

    def fault(self, manifest: UpdateManifest, why: str, receipt: LogReceipt | None = None) -> NoReturn:
        """Keep what was seen before and what came now, say that the peer must not go on, and raise ReceiptFault."""
        path = self.home / FAULT
        reason = one_line(f"the audit log at outer step {manifest.outer_step}: {why}; what was seen is in {path}")
        seen = {"size": self.head.size, "root": self.head.root.hex(), "note": self.head.note}
        values: dict[str, object] = {
            "fault": why,
            "run_id": self.run_id,
            "key": self.key.text(),
            "outer_step": manifest.outer_step,
            "round_id": manifest.round_id,
            "digest": manifest.digest,
            "seen": seen,
            "came": _as_json(receipt) if receipt is not None else None,
        }
        try:
            write_json(path, values, version=_FORMAT)
        except StorageError as error:
            reason = one_line(f"the audit log at outer step {manifest.outer_step}: {why} ({error})")
        self.failed(reason)
        raise ReceiptFault(reason)

    async def save(self) -> None:
        """Bring what was accepted to the disk."""
        async with self._saving:
            await asyncio.to_thread(self.kept.write)


@dataclass(frozen=True, slots=True)
class Verified:
    """What the receipts in a folder come to."""

    receipts: int
    first_step: int
    last_step: int
    head: Head
    key: NoteKey


def verify_kept(home: Path, key: str = "") -> Verified:
    """Verify the receipts that are kept in a peer's folder: signatures, that each entry is in its log, and that each log begins
    with the one before.

    key: the log's public key, from somebody who is trusted with it; '': the one in the folder. Raises ConfigError, and
    ReceiptFault that names the line.
    """
    path, known = home / RECEIPTS, home / KEY
    try:
        text = key or known.read_text().strip()
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: is missing; a peer has receipts once it took part with audit.enabled") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{home}: cannot be read ({error})") from error
    try:
        log = NoteKey.parse(text)
    except ValueError as error:
        raise ConfigError(f"{'--key' if key else known}: {error}") from error
    if not lines:
        raise ConfigError(f"{path}: holds no receipt yet")
    before: Head | None = None
    steps: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            before = _follows(parse_canonical(line), log, before)
            steps.append(int(json.loads(line)["outer_step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ReceiptFault(f"{path}: line {number}: {one_line(str(error))}") from error
    assert before is not None
    return Verified(len(lines), steps[0], steps[-1], before, log)


def _follows(said: Mapping[str, Any], key: NoteKey, before: Head | None) -> Head:
    """Return the head of a line. Raises ValueError where it does not follow the one before; None: this is the first line."""
    head = _head_of(said, key)
    inclusion, consistency = ([_bytes(each) for each in said[name]] for name in ("inclusion", "consistency"))
    if not verify_inclusion(_bytes(said["leaf"]), said["index"], head.size, inclusion, head.root):
        raise ValueError(f"entry {said['index']} is not in the log of {head.size} entries")
    if before is not None:
        if said["from"] != before.size:
            raise ValueError(f"follows a head of {said['from']} entries, the line before has {before.size}")
        if not verify_consistency(before.size, head.size, consistency, before.root, head.root):
            raise ValueError(f"the log of {head.size} entries does not begin with that of {before.size} of the line before")
    return head


def _head_of(said: Mapping[str, Any], key: NoteKey) -> Head:
    if said["format"] != _FORMAT:
        raise ValueError(f"format {said['format']}, this software reads format {_FORMAT}")
    note = str(said["note"])
    checkpoint = parse_checkpoint(open_note(note, [key])[0])
    if checkpoint.origin != key.name:
        raise ValueError(f"the head is of the log {checkpoint.origin}, not of {key.name}")
    return Head(checkpoint.size, checkpoint.root, note)


def _as_json(receipt: LogReceipt) -> dict[str, object]:
    return {
        "entry": receipt.entry.decode(errors="backslashreplace"),
        "index": receipt.index,
        "inclusion": [_text(each) for each in receipt.inclusion],
        "checkpoint": receipt.checkpoint,
        "consistency": [_text(each) for each in receipt.consistency],
        "seen": {str(size): [_text(each) for each in proof] for size, proof in receipt.seen.items()},
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
