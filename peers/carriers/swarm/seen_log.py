"""The entries of the audit log of a part that this peer has checked, kept in its folder: later entries are held to them."""

from __future__ import annotations

from pathlib import Path

from edit.trust.signatures import Signer
from editpb.earlier_keys import earlier_keys
from editpb.identity import Identity
from editpb.seen_entries import SeenBy, SeenEntry, seen_entries, seen_file, seen_line
from peers.carriers.kept_lines import KeptLines

__all__ = ["MOST_SEEN", "SeenLog"]

MOST_SEEN = 1024  # entries of a part; then the older half goes


class SeenLog:
    """receipts-part-N.jsonl. Make it with `open`. `save` runs in a thread, one call after the other."""

    def __init__(self, by: SeenBy, signer: Signer, file: KeptLines, seen: dict[int, SeenEntry]) -> None:
        self._by, self._signer, self._file = by, signer, file
        self._seen = seen  # by outer step, ascending

    @classmethod
    def open(cls, home: Path, part: int, identity: Identity, signer: Signer) -> SeenLog:
        """Read what is kept; a torn last line is passed over. Raises ConfigError where it is damaged, or another peer's."""
        by, path = SeenBy(identity.run_id, identity.peer_id, part), seen_file(home, part)
        file, keys = KeptLines.open(path, MOST_SEEN), (signer.public_key, *earlier_keys(home, identity))
        log = cls(by, signer, file, {})
        for each in seen_entries(path, file.lines, by, keys):
            log._note(each)
        return log

    @property
    def newest(self) -> SeenEntry | None:
        """The last one; None: nothing was seen."""
        return next(reversed(self._seen.values()), None)

    def at(self, outer_step: int) -> SeenEntry | None:
        """Return the entry of an outer step; None: it was not seen, or is kept no longer."""
        return self._seen.get(outer_step)

    def before(self, outer_step: int) -> SeenEntry | None:
        """Return the last entry before that of an outer step."""
        return next((each for step, each in reversed(self._seen.items()) if step < outer_step), None)

    def add(self, seen: SeenEntry) -> None:
        """Take an entry that was checked; `save` brings it to the disk. One that was passed before changes nothing."""
        if (newest := self.newest) is not None and seen.outer_step <= newest.outer_step:
            return
        self._note(seen)
        self._file.add(seen_line(self._by, seen, self._signer))

    def forget(self) -> None:
        """Hold later entries to nothing that was seen until now: one did not fit, and that was said."""
        self._seen = {}

    async def save(self) -> None:
        """Bring what was taken to the disk; one call after the other. What the disk refuses is tried again with the next."""
        await self._file.save()

    def _note(self, seen: SeenEntry) -> None:
        if (newest := self.newest) is not None and seen.outer_step <= newest.outer_step:
            self._seen = {}  # `forget` was called there
        self._seen[seen.outer_step] = seen
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
