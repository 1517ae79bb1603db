"""The audit log on disk: entries appended to audit-log.jsonl, and the signed head of them in audit-log.head.

1. The entry of a commit stands in the journal's commit record, which is on disk before the entry is appended here. So the log
   has no entry of what was not committed, and a start fills in what it lacks: the last one, after a kill.
2. An entry is on disk before the head that is signed for it. A head for more entries than there are means that some were lost.
3. What cannot be appended is kept and tried again before the next commit, which fails until then.

Everything but `open` runs in the worker thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aggregator.storage.journal import Disk
from aggregator.storage.state_folder import AUDIT_HEAD, AUDIT_LOG
from edit.config.run import RunConfig
from edit.durable_files import read_private, sync, write_atomic
from edit.errors import ConfigError, LocalProtocolError, RefusedError, StorageError
from edit.merging.injection import Injected
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.trust.canonical import MOST_LINE_BYTES, parse_canonical
from edit.trust.checkpoints import LogSigner, open_note, parse_checkpoint
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.audit_log import commit_entry, config_entry, consent_entry, continued_entry, entry_line, genesis_entry
from editpb.messages import Consent, ContributionHeader
from editpb.signed_contributions import config_digest

__all__ = ["AuditLog"]

_PRIVATE = "log.key"
_MOST_CONSENTS = 16  # of one peer to one configuration: with as many policies


class AuditLog:
    """The log of one run, for appending. Make it with `open`.

    Args:
        folder: the run's state folder.
        now: unix seconds, for the entries.
        disk: of the log's file, or what a test has in its place.
    """

    def __init__(
        self, folder: Path, run_id: str, config: RunConfig, signer: LogSigner, now: Callable[[], float], disk: Disk
    ) -> None:
        self.path = folder / AUDIT_LOG
        self._head, self._run_id, self._config, self._signer = folder / AUDIT_HEAD, run_id, config, signer
        self._now, self._disk, self._digest = now, disk, config_digest(config)
        self._tree = MerkleTree()
        self._descriptor = -1
        self._end = 0  # the file up to here is whole, and on disk
        self._torn = False  # bytes behind it could not be cut off
        self._pending: list[bytes] = []  # lines that are still to be appended
        self._last = "", 0, ""  # configuration, outer step and digest by the last entry
        self._consents: set[tuple[str, str, str]] = set()  # peer, configuration and policy of those in the log
        self._early: list[tuple[str, Consent]] = []  # those that are still to be said
        self._signed = 0  # entries that the head on disk stands for

    @classmethod
    def open(cls, folder: Path, run_id: str, config: RunConfig, now: Callable[[], float], disk: Disk | None = None) -> AuditLog:
        """Open the log of a state folder; make its key before the first entry. Raises ConfigError, StorageError."""
        path = folder / _PRIVATE
        if not path.exists():
            if (folder / AUDIT_LOG).exists():
                raise ConfigError(
                    f"{path}: is missing, and the log has entries that are signed with it; restore it from a copy"
                )
            write_atomic(path, LogSigner.new_key(), mode=0o600)
        return cls(folder, run_id, config, cls.signer(folder, run_id), now, disk or Disk())

    @staticmethod
    def signer(folder: Path, run_id: str) -> LogSigner:
        """Return what signs for the log of this state folder. Raises ConfigError where its key is not there."""
        path = folder / _PRIVATE
        try:
            return LogSigner(f"edit/{run_id}", read_private(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def key(self) -> str:
        """The log's public key, as text."""
        return self._signer.key.text()

    def __len__(self) -> int:
        return len(self._tree)

    def attach(self, entries: Sequence[str], outer: OuterState) -> None:
        """Read the log, fill in what it lacks of the journal, and note a start that is not where the last entry ends.

        entries: those of the journal since the last checkpoint. outer: the run's state now. Raises StorageError when entries
        are lost, changed, or cannot be written.
        """
        if self._descriptor < 0:
            self._read()
            self._check_head()
        for entry in entries:
            line = entry.encode()
            if (index := _index(line)) > len(self._tree):
                raise StorageError(f"{self.path}: lacks the entries {len(self._tree)} to {index - 1}; restore it from a copy")
            if index < len(self._tree):
                if self._tree.leaf(index) != leaf_hash(line):
                    raise StorageError(f"{self.path}: entry {index} is not the journal's; restore it from a copy")
                continue
            self._pending.append(line)
            self.flush()
        self._begin(outer)

    def commit(
        self,
        outer: OuterState,
        records: Sequence[MergeRecord],
        staged: Mapping[int, Staged],
        contributions: Mapping[int, Sequence[ContributionHeader]],
        *,
        round_id: int,
        outer_step: int,
        reason: str,
        missing: Sequence[str],
        injected: Injected | None,
        privacy: Mapping[str, object] | None = None,
    ) -> str:
        """Return the entry of a commit that is about to be journalled; `append` it once that is done.

        Raises StorageError while the log cannot be written, RefusedError for an entry that nobody could read: nothing is to be
        committed then.
        """
        self._say_consents()
        entry = commit_entry(
            round_id=round_id,
            outer_step=outer_step,
            reason=reason,
            digests=(outer.digest, outer.digest_after(staged)),
            config=self._digest,
            records=records,
            staged=staged,
            contributions=contributions,
            missing=missing,
            injected=injected,
            privacy=privacy or self._claimed(),
        )
        line = entry_line(self._tree, self._now(), entry)
        if len(line) > MOST_LINE_BYTES:  # honest ones have a few hundred bytes for each shard of a fragment
            parts = {peer: len(given["parts"]) for peer, given in entry["contributions"].items()}
            most = max(sorted(parts), key=lambda peer: parts[peer])
            raise RefusedError(
                f"the entry of the audit log would be too long: {most} contributes {parts[most]} shards; evict it"
            )
        return line.decode()

    def _claimed(self) -> dict[str, object] | None:
        """Return the bound that each peer keeps for itself, where there is one."""
        privacy = self._config.privacy
        if not privacy.of_examples:
            return None
        most = {"epsilon_max": privacy.epsilon_max, "delta": privacy.delta}
        return {"level": privacy.level, "unit": privacy.unit, **most}

    def append(self, entry: str) -> None:
        """Append the entry of a commit that is journalled. Raises StorageError; then `flush` tries again."""
        self._pending.append(entry.encode())
        self.flush()

    def flush(self) -> None:
        """Append what is kept, and sign for it. Raises StorageError: what is left is kept."""
        while self._pending:
            if _index(self._pending[0]) != len(self._tree):
                raise LocalProtocolError(f"audit log: entry {_index(self._pending[0])} after {len(self._tree)} entries")
            self._write(self._pending[0] + b"\n")
            self._last = _position(self._pending[0], self._last)
            self._tree.append(leaf_hash(self._pending.pop(0)))
        if self._signed != len(self._tree):
            write_atomic(self._head, self._signer.sign(len(self._tree), self._tree.root()).encode())
            self._signed = len(self._tree)

    def consent(self, peer_id: str, consent: Consent) -> None:
        """Append a consent, unless the log has it, or `_MOST_CONSENTS` of this peer to this configuration.

        Before the log has entries it is kept until then. Raises StorageError: it is tried again before the next commit.
        """
        named = (peer_id, consent.config_digest, consent.policy_digest)
        if named in self._consents or sum(each[:2] == named[:2] for each in self._consents) >= _MOST_CONSENTS:
            return
        self._consents.add(named)
        self._early.append((peer_id, consent))
        if len(self._tree):
            self._say_consents()

    def _say_consents(self) -> None:
        self.flush()
        while self._early:
            self._say(consent_entry(*self._early.pop(0)))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, outer: OuterState) -> None:
        """Append what is to be said of this start."""
        if not len(self._tree):
            genesis = genesis_entry(
                self._run_id, self._signer.key, self._config, outer.schema.schema_hash, outer.outer_step, outer.digest
            )
            self._say(genesis)
        config, outer_step, digest = self._last
        if config != self._digest:
            self._say(config_entry(self._config))
        if (outer_step, digest) != (outer.outer_step, outer.digest):
            self._say(continued_entry(outer.outer_step, outer.digest))
        self._say_consents()

    def _say(self, entry: Mapping[str, object]) -> None:
        self._pending.append(entry_line(self._tree, self._now(), entry))
        self.flush()

    def _read(self) -> None:
        """Open the file and cut off a torn line. Raises StorageError."""
        new = not self.path.exists()
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            if new:
                sync(self.path.parent, self._disk.fsync)
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):  # a killed process was writing it; the journal has it
                        break
                    self._last = _position(line[:-1], self._last)
                    self._consents |= _consent_in(line)
                    self._tree.append(leaf_hash(line[:-1]))
                    self._end += len(line)
            os.ftruncate(self._descriptor, self._end)
            self._disk.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be opened ({error.strerror})") from error
        except ValueError as error:
            raise StorageError(f"{self.path}: entry {len(self._tree)} is damaged ({error}); restore it from a copy") from error

    def _check_head(self) -> None:
        try:
            text, _ = open_note(self._head.read_bytes(), [self._signer.key])
            head = parse_checkpoint(text)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{self._head}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise StorageError(f"{self._head}: is damaged ({error}); restore it from a copy") from error
        if head.size > len(self._tree):
            raise StorageError(
                f"{self.path}: has {len(self._tree)} of the {head.size} entries of {self._head.name}; restore it from a copy"
            )
        if self._tree.root(head.size) != head.root:
            raise StorageError(f"{self.path}: is not what {self._head.name} is signed for; restore both from a copy")
        self._signed = head.size

    def _write(self, line: bytes) -> None:
        self._mend()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._disk.write(self._descriptor, rest) :]
            self._disk.fsync(self._descriptor)
        except Exception as error:
            self._torn = True
            if isinstance(error, OSError):
                raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error
            raise
        self._end += len(line)

    def _mend(self) -> None:
        """Cut off what a failed write has left. Raises StorageError."""
        if not self._torn:
            return
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            raise StorageError(f"{self.path}: bytes behind {self._end} cannot be cut off ({error.strerror})") from error
        self._torn = False


def _index(line: bytes) -> int:
    try:
        return int(json.loads(line)["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"the journal: an entry of the audit log is damaged ({error!r})") from error


def _consent_in(line: bytes) -> set[tuple[str, str, str]]:
    """Return peer, configuration and policy of a consent's entry; of no other. The entry was read before."""
    if b'"kind":"consent"' not in line:
        return set()
    entry = json.loads(line)
    return {(str(entry["peer"]), str(entry["config_digest"]), str(entry["policy_digest"]))} if "peer" in entry else set()


def _position(line: bytes, before: tuple[str, int, str]) -> tuple[str, int, str]:
    """Return configuration, outer step and digest after an entry. Raises ValueError for a damaged one."""
    entry = parse_canonical(line)
    config, outer_step, digest = before
    try:
        match entry["kind"]:
            case "commit":
                return entry["config_digest"], entry["outer_step"], entry["after"]
            case "genesis":
                return entry["config_digest"], entry["outer_step"], entry["digest"]
            case "config":
                return entry["config_digest"], outer_step, digest
            case "consent":
                return before
            case _:
                return config, entry["outer_step"], entry["digest"]
    except (KeyError, TypeError) as error:
        raise ValueError(repr(error)) from error
