"""The heads of the audit log that members have cosigned: audit-log.cosigned/SIZE.note, each a signed note with one line of each
member that vouches for the head.

They are evidence, and no part of the run: peers say theirs again and again, so what a kill loses comes with a later heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edit.durable_files import names_in, write_atomic
from edit.errors import StorageError
from edit.trust.checkpoints import (
    MOST_SIGNATURES,
    Checkpoint,
    NoteKey,
    open_note,
    parse_checkpoint,
    signature_line,
    signature_of,
    signatures_under,
)
from editpb.messages import SeenHead

__all__ = ["MOST_HEADS", "Cosignatures", "note_files"]

MOST_HEADS = 8  # the newest ones that somebody has cosigned
_SUFFIX = ".note"


def note_files(folder: Path) -> dict[int, Path]:
    """Return the notes in a folder by the size that their names say, smallest first; none where there is no folder.

    Raises StorageError.
    """
    sizes = {folder / name: name.removesuffix(_SUFFIX) for name in names_in(folder) if name.endswith(_SUFFIX)}
    return {int(size): path for path, size in sorted(sizes.items(), key=lambda one: one[1].zfill(20)) if size.isdecimal()}


@dataclass(slots=True)
class _Head:
    text: str
    log: bytes  # the log's own signature
    members: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # by name: key id and signature


class Cosignatures:
    """What is kept of cosignatures: at most one of a member under each of the `MOST_HEADS` newest heads.

    Everything is called on the event loop, but `load`, before anything else, and `write`: those in the worker thread.
    """

    def __init__(self, folder: Path, log: NoteKey) -> None:
        self._folder, self._log = folder, log
        self._heads: dict[int, _Head] = {}
        self._unsaved = False

    def load(self) -> dict[Path, Checkpoint]:
        """Read what is on disk; return the heads, which the log must have. Raises StorageError."""
        found = {}
        for size, path in list(note_files(self._folder).items())[-MOST_HEADS:]:
            try:
                note = path.read_bytes()
                text, _ = open_note(note, [self._log])
                found[path] = parse_checkpoint(text)
                members = {name: (key_id, signature) for name, key_id, signature in signatures_under(note)}
                del members[self._log.name]
                self._heads[size] = _Head(text, signature_of(note, self._log), members)
                if found[path].size != size:
                    raise ValueError("its name says another size")
            except OSError as error:
                raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
            except ValueError as error:
                raise StorageError(f"{path}: is damaged ({error}); restore it from a copy, or move it away") from error
        return found

    def add(self, head: SeenHead, member: NoteKey, signature: bytes) -> bool:
        """Keep a member's signature under a head that this log has and has signed; return whether that is news.

        Raises ValueError for a signature that is not the member's.
        """
        if head.size not in self._heads and len(self._heads) >= MOST_HEADS and head.size < min(self._heads):
            return False
        text = Checkpoint(self._log.name, head.size, head.root).text()
        known = self._heads.get(head.size) or _Head(text, head.signature)
        if known.members.get(member.name, (b"",))[0] == member.key_id:
            return False
        if not member.verifies(signature, text):
            raise ValueError(f"the signature of {member.name} under the head of {head.size} entries is not of its text")
        if member.name not in known.members and len(known.members) >= MOST_SIGNATURES - 1:
            return False
        known.members[member.name] = member.key_id, signature
        self._heads[head.size] = known
        self._heads = {size: self._heads[size] for size in sorted(self._heads)[-MOST_HEADS:]}
        self._unsaved = True
        return True

    def unsaved(self) -> Mapping[int, str] | None:
        """Return the notes to be written, by size, as `write` takes them; None: nothing is new since the last call."""
        if not self._unsaved:
            return None
        self._unsaved = False
        return {size: self._note(head) for size, head in self._heads.items()}

    def write(self, notes: Mapping[int, str]) -> None:
        """Bring these notes to the disk, and remove all others. Raises StorageError."""
        try:
            self._folder.mkdir(exist_ok=True)
            there = note_files(self._folder)
            for size, note in notes.items():
                path = self._folder / f"{size}{_SUFFIX}"
                if size not in there or path.read_bytes() != note.encode():
                    write_atomic(path, note.encode())
            for size in there.keys() - notes.keys():
                there[size].unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written ({error.strerror})") from error

    def _note(self, head: _Head) -> str:
        lines = [(self._log.name, self._log.key_id, head.log)]
        lines += [(name, *head.members[name]) for name in sorted(head.members)]
        return f"{head.text}\n{''.join(signature_line(*line) for line in lines)}"
