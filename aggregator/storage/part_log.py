"""The audit log of one part of a swarm at one member: entries appended to a file in the part's folder.

    audit-log.jsonl             from the part's genesis on
    audit-log-00000050.jsonl    from entry 50 on: this member took a snapshot there, and its first line (`begins`) has the
                                hashes that the tree of the 50 entries before goes on from
    *.replaced                  a log of an earlier lineage, which another one that begins at the same entry took the place of

1. Entry t is the commit to outer step t. It stands in the journal's commit record, which is on disk before the entry is
   appended here, once the step is taken. So a start fills in what the log lacks: the last one, after a kill. Where the journal
   does not know yet that the last entry became an outer step, it is cut off here, and comes again.
2. Each checkpoint has the hashes that the tree went on from then, and a log that does not have its entries is not gone on with.
3. What cannot be appended is kept and tried again before the next update is held, which fails until then.

Nobody signs a head: each entry is signed by the owner of the part, with the root of all entries before it.

Used by the part's thread, and by the engine's: what is kept is appended by one of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from aggregator.storage.journal import Disk
from aggregator.storage.line_file import LineFile
from aggregator.storage.state_folder import AUDIT_LOG, part_log_of, part_logs
from edit.config.run import RunConfig
from edit.durable_files import make_folder, write_atomic
from edit.errors import ConfigError, GoneError, LocalProtocolError, RemoteProtocolError, StaleError, StorageError
from edit.merging.outer_state import OuterState
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.messages import LoggedEntry
from editpb.part_entries import begins_line, begun_with, consents_named, genesis_line
from editpb.signed_contributions import config_digest

__all__ = ["PartLog"]

# Entries that a peer beside this host may still ask for: as many as updates are kept, or these if they are small.
_MOST_KEPT, _MOST_BYTES = 64, 16 << 20


class PartLog:
    """See above. `found` it, `attach` it to what the part's store has recovered, or `begin` it with a snapshot.

    Args:
        folder: of the part.
        disk: what appends, or what a test has in its place.
    """

    def __init__(self, folder: Path, run_id: str, part: int, config: RunConfig, disk: Disk | None = None) -> None:
        self._folder, self._run_id, self._part, self._config = folder, run_id, part, config
        self._disk, self._digest = disk or Disk(), config_digest(config)
        self._tree = MerkleTree()
        # By peer: `part_entries.consent_name` of the last one in this log; replaced, never changed.
        self.consents: dict[str, str] = {}
        # By outer step, each with the tree that it is in; replaced, never changed: the event loop reads it, too.
        self._last: dict[int, tuple[LoggedEntry, MerkleTree]] = {}
        self._file: LineFile | None = None
        self._pending: list[bytes] = []  # lines that are still to be appended
        self._appending = Lock()

    @property
    def tree(self) -> MerkleTree:
        """Of all entries. Raises StorageError while the last one cannot be written."""
        self.flush()
        return self._tree

    def entry(self, outer_step: int, seen: int = 0) -> LoggedEntry:
        """Return the entry of the commit to an outer step, of the last ones. Any thread.

        seen: how many entries before it who asks has seen: with the proof that the log begins with them, if that is known here.

        Raises StaleError while it is still to come, GoneError where it is not in this log, or kept no longer.
        """
        last = self._last
        if (found := last.get(outer_step)) is not None:
            return _with_proof(*found, outer_step, seen)
        if outer_step > max(last, default=0):
            raise StaleError(f"part {self._part}: the audit log has no entry of outer step {outer_step} yet; ask again")
        raise GoneError(f"part {self._part}: the entry of outer step {outer_step} is kept no longer, or is not in this log")

    def goes_on(self, old: int, new: int) -> tuple[bytes, ...]:
        """Return the proof that the first `new` entries begin with the first `old`. Any thread.

        Raises GoneError where this log has fewer, or begins later.
        """
        try:
            return self._tree.consistency_proof(old, new)
        except IndexError as error:
            raise GoneError(f"part {self._part}: of the audit log here it is not known: {error}") from error

    def found(self, outer: OuterState) -> None:
        """Begin the log of a new run with its genesis. Raises StorageError."""
        for _, path in part_logs(self._folder):  # of a founding that came to nothing
            path.unlink()
        self._make(self._folder / AUDIT_LOG, self._genesis(outer))

    def attach(self, peaks: Sequence[bytes], size: int, entries: Sequence[str], held: str, outer: OuterState) -> None:
        """Read the log, and fill in what it lacks of the journal.

        Args:
            peaks, size: of the tree of all entries when the checkpoint was written.
            entries: of the commits after the checkpoint.
            held: that of the update that is held; empty: none is.
            outer: the part's state now.

        Raises StorageError when entries are lost, were changed, or cannot be written.
        """
        try:
            root = MerkleTree.after(size, peaks).root()
        except ValueError as error:
            raise StorageError(f"{self._folder}: the checkpoint has no head of an audit log ({error})") from error
        self._find(size, root)
        assert self._file is not None
        if (
            held
            and len(self._tree) == outer.outer_step + 2
            and self._tree.leaf(len(self._tree) - 1) == leaf_hash(held.encode())
        ):
            self._file.take_back(held.encode())
            self._read(self._file.path)
        for index, entry in enumerate(entries, size):
            if index < len(self._tree):
                if self._tree.leaf(index) != leaf_hash(entry.encode()):
                    raise StorageError(f"{self._file.path}: entry {index} is not the journal's; restore it from a copy")
            else:
                self._pending.append(entry.encode())
                self.flush()
        if len(self._tree) != outer.outer_step + 1:
            wanted = f"has {len(self._tree)} entries, and the part is at outer step {outer.outer_step}"
            raise StorageError(f"{self._file.path}: {wanted}; restore it from a copy")

    def begin(self, outer: OuterState, peaks: Sequence[bytes]) -> None:
        """Go on after a snapshot: with the log that is here, if that leads there, else with a new one.

        peaks: of the tree of all entries up to then. Raises RemoteProtocolError where these cannot be, StorageError.
        """
        size = outer.outer_step + 1
        try:
            tree = MerkleTree.after(size, peaks)
        except ValueError as error:
            raise RemoteProtocolError(f"part {self._part}: the head of an audit log has {error}") from error
        if self._file is not None and not self._pending and (len(self._tree), self._tree.root()) == (size, tree.root()):
            return
        if size == 1:
            path, first = self._folder / AUDIT_LOG, self._genesis(outer)
            if leaf_hash(first) != tree.root():
                raise RemoteProtocolError(f"part {self._part}: its audit log begins otherwise than it would here")
        else:
            path, schema = part_log_of(self._folder, size), outer.schema.schema_hash
            first = begins_line(self._run_id, self._part, self._config, schema, outer.outer_step, outer.digest, tree.peaks)
        try:
            if path.exists():
                path.replace(path.with_name(f"{path.name}.replaced"))
        except OSError as error:
            raise StorageError(f"{path}: cannot be renamed ({error.strerror})") from error
        self._make(path, first)

    def append(self, entry: str) -> None:
        """Append the entry of an outer step that is taken. Raises StorageError; then `flush` tries again."""
        self._pending.append(entry.encode())
        self.flush()

    def flush(self) -> None:
        """Append what is kept. Raises StorageError: what is left is kept."""
        with self._appending:
            while self._pending:
                if self._file is None:
                    raise LocalProtocolError("the audit log of a part was not read")
                self._file.append(self._pending[0])
                self._take(self._tree, self._pending.pop(0))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _genesis(self, outer: OuterState) -> bytes:
        return genesis_line(self._run_id, self._part, self._config, outer.schema.schema_hash, outer.digest)

    def _make(self, path: Path, first: bytes) -> None:
        make_folder(path.parent)
        write_atomic(path, first + b"\n", mode=0o600)
        self._read(path)

    def _find(self, size: int, root: bytes) -> None:
        """Open the newest log that has the tree of these entries. Raises StorageError."""
        for first, path in reversed(part_logs(self._folder)):
            self._read(path)
            try:
                if self._tree.root(size) == root:
                    return
            except IndexError:
                pass  # it begins later, or ends before
            if first == len(self._tree):  # of a snapshot that was never taken
                self.close()
                path.unlink()
        self.close()
        raise StorageError(
            f"{self._folder}: no audit log has the {size} entries that its checkpoint was written with; restore it from a copy"
        )

    def _read(self, path: Path) -> None:
        """Open a log, and read its tree. Raises StorageError."""
        self.close()
        self._file, self._pending, self._last = LineFile(path, self._disk), [], {}
        self.consents = {}
        tree: MerkleTree | None = None

        def take(line: bytes) -> None:
            nonlocal tree
            if tree is None:
                tree, configured = begun_with(line)
                if configured != self._digest:
                    raise ConfigError(f"{path}: was begun with other settings than those of run.toml; set them back")
            else:
                self._take(tree, line)

        try:
            self._file.read(take)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path}: its first line is damaged ({error!r}); restore it from a copy") from error
        self._tree = tree or MerkleTree()

    def _take(self, tree: MerkleTree, line: bytes) -> None:
        """Note the next entry, which is that of the outer step of its number."""
        kept = [*self._last.items(), (len(tree), (LoggedEntry(line, tree.peaks), tree))]
        least, most = self._config.kept_updates, max(_MOST_KEPT, self._config.kept_updates)
        kept = kept[-most:]
        size = sum(len(logged.entry) for _, (logged, _) in kept)
        while size > _MOST_BYTES and len(kept) > least:
            _, (logged, _) = kept.pop(0)
            size -= len(logged.entry)
        self._last = dict(kept)
        if said := consents_named(line):
            self.consents = {**self.consents, **said}
        tree.append(leaf_hash(line))


def _with_proof(logged: LoggedEntry, tree: MerkleTree, outer_step: int, seen: int) -> LoggedEntry:
    """See `PartLog.entry`. Entries are only added to the tree, so another thread may do that meanwhile."""
    try:
        return replace(logged, consistency=tree.consistency_proof(seen, outer_step))
    except IndexError:  # the log here begins with a later entry
        return logged
