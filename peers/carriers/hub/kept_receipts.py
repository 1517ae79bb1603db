"""The receipts that a peer keeps in its folder, and their verification without the run.

log.vkey              the log's public key: from the invitation, or from the first coordinator that said one
receipts.jsonl        the head of each receipt that was accepted, with the proof that its log begins with the head before
receipt-fault.json    a receipt that did not fit: what was seen before, and what came. While it is there the peer does not
                      take part
fetched.head          at an auditor: the signed head of the log that it fetched last
aggregator-N          a folder with the same files, for the log of a further aggregator
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit.durable_files import check_format, write_atomic
from edit.errors import ConfigError, RefusedError
from edit.plain_text import reason_of
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.checkpoints import NoteKey, open_note, parse_checkpoint
from edit.trust.merkle import leaf_hash, verify_consistency, verify_inclusion
from editpb.limits import one_line
from editpb.messages import LogReceipt
from editpb.receipts import NOTHING_SEEN, Head, ReceiptFault
from peers.carriers.kept_lines import KeptLines

__all__ = [
    "FAULT",
    "FETCHED",
    "FORMAT",
    "KEY",
    "RECEIPTS",
    "KeptReceipts",
    "Verified",
    "base64_text",
    "kept_of",
    "kept_places",
    "other_key",
    "pinned_key",
    "verify_all",
    "verify_kept",
]

KEY, RECEIPTS, FAULT, FETCHED = "log.vkey", "receipts.jsonl", "receipt-fault.json", "fetched.head"
_FURTHER = "aggregator-"  # and its number: the folder of a further aggregator's log
FORMAT = 1  # of receipts.jsonl, in each line, and of receipt-fault.json
_MOST_KEPT = 10_000  # lines; then the older half goes


def kept_of(home: Path, aggregator: int) -> Path:
    """Return where the receipts of an aggregator's log lie; 0: the coordinator's, in the peer's folder itself."""
    return home / f"{_FURTHER}{aggregator}" if aggregator else home


def kept_places(home: Path) -> list[Path]:
    """Return where receipts lie in a peer's folder: in itself, then those of further aggregators, in order."""
    numbers = (path.name.removeprefix(_FURTHER) for path in home.glob(f"{_FURTHER}*"))
    return [home, *(kept_of(home, each) for each in sorted(int(name) for name in numbers if name.isascii() and name.isdigit()))]


def pinned_key(home: Path, said: str, origin: str) -> NoteKey:
    """Return the key of a log; keep the first one that is said. Raises ConfigError, RefusedError, StorageError.

    origin: `editpb.audit_log.log_origin`.
    """
    path = home / KEY
    try:
        known = path.read_text().strip() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({reason_of(error)})") from error
    if not said:
        raise RefusedError("the run has audit.enabled, and its coordinator does not say the log's key; its software is too old")
    if known and known != said:
        raise other_key(home, said)
    try:
        key = NoteKey.parse(said)
    except ValueError as error:
        raise RefusedError(f"the coordinator says a key of its audit log that is {error}") from error
    if key.name != origin:
        raise RefusedError(f"the coordinator says the key of the log {key.name}, this one's is {origin}")
    if not known:
        write_atomic(path, said.encode() + b"\n")
    return key


def other_key(home: Path, said: str) -> RefusedError:
    """Return what is wrong where a log has another key than the one that is kept."""
    return RefusedError(f"{home / KEY}: this peer knows another key of the run's audit log than the coordinator says, {said}")


class KeptReceipts:
    """receipts.jsonl, for appending. Make it with `open`. `save` runs in a thread, one call after the other."""

    def __init__(self, file: KeptLines, head: Head) -> None:
        self.head = head
        self.saved = head  # the last one that is on disk
        self._file = file

    @classmethod
    def open(cls, home: Path, key: NoteKey) -> KeptReceipts:
        """Read what is kept; a torn last line is passed over. Raises ConfigError where it is damaged."""
        path = home / RECEIPTS
        file = KeptLines.open(path, _MOST_KEPT)
        head = NOTHING_SEEN
        if file.lines:
            try:
                head = _head_of(_line(path, file.lines[-1]), key)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: line {len(file.lines)} is damaged ({error}); restore it from a copy") from error
        return cls(file, head)

    def add(self, head: Head, receipt: LogReceipt, outer_step: int) -> None:
        """Take a receipt whose head follows the last one; `save` brings it to the disk."""
        said = {
            "format": FORMAT,
            "outer_step": outer_step,
            "index": receipt.index,
            "leaf": base64_text(leaf_hash(receipt.entry)),
            "inclusion": [base64_text(each) for each in receipt.inclusion],
            "note": receipt.checkpoint,
            "from": self.head.size,
            "consistency": [base64_text(each) for each in receipt.consistency],
        }
        self._file.add(canonical(said))
        self.head = head

    async def save(self) -> None:
        """Bring what was taken to the disk; one call after the other. What the disk refuses is tried again with the next."""
        head = self.head
        if await self._file.save():
            self.saved = head


@dataclass(frozen=True, slots=True)
class Verified:
    """What the receipts in a folder come to."""

    receipts: int
    first_step: int
    last_step: int
    head: Head
    key: NoteKey

    def as_json(self) -> dict[str, object]:
        """Return the values for scripts."""
        return {
            "receipts": self.receipts,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "entries": self.head.size,
            "root": self.head.root.hex(),
            "key": self.key.text(),
        }


def verify_kept(home: Path, key: str = "") -> Verified:
    """Verify the receipts that are kept in a peer's folder: signatures, that each entry is in its log, and that each log begins
    with the one before.

    key: the log's public key, from somebody who is trusted with it; '': the one in the folder. Raises ConfigError, and
    ReceiptFault that names the line, also where a receipt did not fit.
    """
    path, known = home / RECEIPTS, home / KEY
    if (fault := home / FAULT).exists():
        raise ReceiptFault(f"{fault}: a receipt did not fit; it is in that file, with what was seen before")
    try:
        text = key or known.read_text().strip()
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: is missing; a peer has receipts once it took part with audit.enabled") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{home}: cannot be read ({reason_of(error)})") from error
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
            said = _line(path, line)
            before = _follows(said, log, before)
            steps.append(int(said["outer_step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ReceiptFault(f"{path}: line {number}: {one_line(str(error))}") from error
    assert before is not None
    return Verified(len(lines), steps[0], steps[-1], before, log)


def verify_all(home: Path, keys: Sequence[str] = ()) -> list[Verified]:
    """Verify the receipts of every aggregator's log in a peer's folder, the coordinator's first.

    keys: public keys of logs, from somebody who is trusted with them; a log whose key is not among them: the one in the folder.
    Raises as `verify_kept`, and ConfigError for a key of no log that is here.
    """
    places = kept_places(home)
    if len(places) == 1 and len(keys) == 1:
        return [verify_kept(home, keys[0])]
    given = {text.partition("+")[0]: text for text in keys}
    found = [verify_kept(place, given.pop(_name_of_log(place), "")) for place in places]
    if given:
        raise ConfigError(
            f"--key: of the log {next(iter(given))}; here are receipts of {', '.join(one.key.name for one in found)}"
        )
    return found


def _name_of_log(home: Path) -> str:
    """Return the name that the kept key has; '' where there is none, which `verify_kept` says."""
    try:
        return (home / KEY).read_text().partition("+")[0]
    except (OSError, UnicodeDecodeError):
        return ""


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


def _line(path: Path, line: bytes) -> Mapping[str, Any]:
    """Return what a line says. Raises ValueError, and FormatError for one of another format."""
    said = parse_canonical(line)
    if not isinstance(said, dict):
        raise ValueError("not a JSON object")
    check_format(path, said.get("format", 1), FORMAT)
    return said


def _head_of(said: Mapping[str, Any], key: NoteKey) -> Head:
    note = str(said["note"])
    checkpoint = parse_checkpoint(open_note(note, [key])[0])
    if checkpoint.origin != key.name:
        raise ValueError(f"the head is of the log {checkpoint.origin}, not of {key.name}")
    return Head(checkpoint.size, checkpoint.root, note)


def base64_text(data: bytes) -> str:
    """Return bytes as they stand in these files."""
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
