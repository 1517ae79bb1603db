"""What a peer of a swarm has seen of the audit log of a part: lines that it keeps in its folder, each signed with its key.

    receipts-part-N.jsonl    in the peer's folder

The statement ("edit-seen-entry-v1") has the run, the peer, the part, the outer step, the hash of its entry, and the root of the
tree of all entries up to it. So a changed line, or that of another peer, is found, and nobody is accused over it.
A line from before the peer was invited again is signed with its key of then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit.durable_files import check_format
from edit.errors import ConfigError
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.signatures import Signer, is_signed, statement
from editpb.limits import one_line

__all__ = ["SEEN_FILES", "SEEN_FORMAT", "SeenBy", "SeenEntry", "read_seen", "seen_entries", "seen_file", "seen_line"]

SEEN_FILES = "receipts-part-*.jsonl"  # of all parts
SEEN_FORMAT = 1
_PURPOSE = "edit-seen-entry-v1"


def seen_file(home: Path, part: int) -> Path:
    """Return where a peer keeps what it has seen of the log of a part."""
    return home / SEEN_FILES.replace("*", str(part))


@dataclass(frozen=True, slots=True)
class SeenEntry:
    """An entry that a peer has checked."""

    outer_step: int
    leaf: bytes  # its hash in the tree
    root: bytes  # of all entries up to it

    @property
    def size(self) -> int:
        """How many entries the tree has with it."""
        return self.outer_step + 1


@dataclass(frozen=True, slots=True)
class SeenBy:
    """Who has seen an entry, and of which log."""

    run_id: str
    peer_id: str
    part: int

    def statement(self, seen: SeenEntry) -> bytes:
        """Return what is signed."""
        return statement(_PURPOSE, (self.run_id, self.peer_id, self.part, seen.outer_step, seen.leaf, seen.root))


def seen_line(by: SeenBy, seen: SeenEntry, signer: Signer) -> bytes:
    """Return the line of an entry, signed, without its end."""
    return canonical(
        {
            "format": SEEN_FORMAT,
            "run_id": by.run_id,
            "peer_id": by.peer_id,
            "part": by.part,
            "outer_step": seen.outer_step,
            "leaf": seen.leaf.hex(),
            "root": seen.root.hex(),
            "signature": signer.sign(by.statement(seen)).hex(),
        }
    )


def read_seen(path: Path, line: bytes, by: SeenBy, public_keys: Collection[bytes]) -> SeenEntry:
    """Return what a line says. public_keys: of the peer (DER), earlier ones, too.

    Raises ValueError where it is damaged, or of another peer or part, and FormatError for one of another format.
    """
    said = parse_canonical(line)
    if not isinstance(said, dict):
        raise ValueError("it is not a JSON object")
    try:
        check_format(path, said["format"], SEEN_FORMAT)
        return _checked(said, by, public_keys)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from error


def seen_entries(path: Path, lines: Iterable[bytes], by: SeenBy, public_keys: Collection[bytes]) -> Iterator[SeenEntry]:
    """Yield what the lines of a file say, as `read_seen`. Raises ConfigError that names the line, and the mend."""
    for number, line in enumerate(lines, start=1):
        try:
            yield read_seen(path, line, by, public_keys)
        except ValueError as error:
            mend = "restore it from a copy, or move it away; without it nobody notices here if the audit log was changed before"
            raise ConfigError(f"{path}: line {number} cannot be used: {error}; {mend}") from error


def _checked(said: Mapping[str, Any], by: SeenBy, public_keys: Collection[bytes]) -> SeenEntry:
    found = SeenBy(*(said[name] for name in ("run_id", "peer_id", "part")))
    if found != by:
        raise ValueError(
            one_line(
                f"{found.peer_id} has seen it, of part {found.part} of the run {found.run_id}; "
                f"this is {by.peer_id}, part {by.part} of the run {by.run_id}"
            )
        )
    leaf, root, signature = (_bytes(said[name]) for name in ("leaf", "root", "signature"))
    seen = SeenEntry(said["outer_step"], leaf, root)
    if not any(is_signed(key, signature, by.statement(seen)) for key in public_keys):
        raise ValueError("it is not signed with a key of this peer")
    return seen


def _bytes(text: str) -> bytes:
    found = bytes.fromhex(text)
    if found.hex() != text:
        raise ValueError(f"not hexadecimal digits: {text[:16]}")
    return found
