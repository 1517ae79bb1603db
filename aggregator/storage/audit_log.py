"""The audit log on disk: entries appended to audit-log.jsonl, and the signed head of them in audit-log.head.

1. The entry of a commit stands in the journal's commit record, all but what the commit leads to: the digest after it and the
   hashes of the update. That is added once the commit is applied; a start that applies it again comes to the same bytes. The
   record is on disk before the entry is appended here. So the log has no entry of what was not committed, and a start fills in
   what it lacks: the last one, after a kill.
2. An entry is on disk before the head that is signed for it. A head for more entries than there are means that some were lost.
   The head of the first entry is on disk before the second entry is: so entries without a head mean that it was lost.
3. The entry of a commit that cannot be appended is kept and tried again before the next commit, which fails until then. No
   other entry that cannot be appended is kept: whoever has said it says it again.

Everything runs in the worker thread, but `open`, and on the event loop `receipt`, `misfit` and `cosigned`, which see the log as
it was when a head was signed last: entries that are counted there do not change.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.storage.cosignatures import Cosignatures
from aggregator.storage.journal import Disk
from aggregator.storage.line_file import LineFile
from aggregator.storage.log_key import open_log_key
from aggregator.storage.state_folder import AUDIT_COSIGNED, AUDIT_HEAD, AUDIT_LOG
from edit.config.in_force import in_force
from edit.config.run import RunConfig
from edit.durable_files import write_atomic
from edit.errors import (
    BusyError,
    GoneError,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    StorageError,
)
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.plain_text import parse_json
from edit.records import Commit
from edit.trust.canonical import parse_canonical
from edit.trust.checkpoints import Checkpoint, LogSigner, NoteKey, open_note, parse_checkpoint
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.audit_log import (
    RoundFacts,
    approval_entry,
    check_length,
    claimed_privacy,
    commit_entry,
    completed,
    config_entry,
    consent_entry,
    continued_entry,
    entry_line,
    genesis_entry,
    log_origin,
    score_entry,
)
from editpb.limits import MAX_SEEN_PROOFS
from editpb.messages import Approval, Consent, ContributionHeader, Cosignature, LogReceipt, ScoreReport, SeenHead
from editpb.signed_contributions import config_digest

__all__ = ["AuditLog"]

_log = logging.getLogger(__name__)
_RESTORE = "restore it from a copy"
_MOST_FITTING = 1024  # heads of which is kept that they fit
_MOST_CONSENTS = 16  # of one peer to one configuration: with as many policies


class _Commit(NamedTuple):
    """The entry of a commit."""

    number: int  # of the entry
    line: bytes
    seen: frozenset[int]  # sizes of the heads that it names


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
        self._now, self._digest = now, config_digest(config)
        self._tree = MerkleTree()
        self._file = LineFile(self.path, disk)
        self._pending: list[bytes] = []  # lines of commits that are still to be appended
        self._last = "", 0, ""  # configuration, outer step and digest by the last entry
        self._consents: set[tuple[str, str, str]] = set()  # peer, configuration and policy of those in the log
        self._early: list[tuple[str, Consent]] = []  # those that are still to be said
        self._approvals: set[tuple[str, str, int]] = set()  # approver, configuration and its number of those in the log
        self._signed = 0  # entries that the head on disk stands for
        # What the event loop reads, replaced and never changed: that head; the entries of the last commits, by outer step.
        self._shown = (0, "")
        self._standing = ""
        self._commits: dict[int, _Commit] = {}
        self._fitting: dict[SeenHead, None] = {}  # heads that fit, the last ones; on the event loop
        self._keys: set[tuple[str, str]] = set()  # members and their public keys (base64) by the entries
        self._shown_keys: frozenset[tuple[str, str]] = frozenset()  # likewise, by those that the head on disk stands for
        self.cosignatures = Cosignatures(folder / AUDIT_COSIGNED, signer.key)

    @classmethod
    def open(
        cls,
        folder: Path,
        run_id: str,
        config: RunConfig,
        now: Callable[[], float],
        disk: Disk | None = None,
        *,
        aggregator: int = 0,
    ) -> AuditLog:
        """Open the log of a state folder; make its key before the first entry. Raises ConfigError, StorageError."""
        signer = open_log_key(folder, log_origin(run_id, aggregator))
        return cls(folder, run_id, config, signer, now, disk or Disk())

    @property
    def of_results(self) -> bool:
        """See `aggregator.storage.store.Entries`."""
        return False

    @property
    def key(self) -> str:
        """The log's public key, as text."""
        return self._signer.key.text()

    @property
    def standing(self) -> str:
        """How many entries are signed for, and the beginning of their root, in words; '' before the first head."""
        return self._standing

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def kept(self) -> dict[str, object]:
        """What a checkpoint says of the log, as JSON values: it had so many entries by then, with this key."""
        return {"key": self.key, "entries": self._signed}

    def attach(self, entries: Sequence[str], outer: OuterState, kept: Mapping[str, object] | None = None) -> None:
        """Read the log, fill in what it lacks of the journal, and note a start that is not where the last entry ends.

        entries: those of the journal since the last checkpoint. outer: the run's state now. kept: what the last checkpoint
        says of the log; None: nothing. Raises StorageError when entries are lost, changed, or cannot be written.
        """
        if not self._file.is_open:
            try:
                self._read()
                self._check_head()
                self._check_cosigned()
                self._check_kept(kept or {})
            except BaseException:
                self._file.close()  # the next call reads it again
                raise
        for entry in entries:
            line = entry.encode()
            if (index := _index(line)) > len(self._tree):
                raise StorageError(f"{self.path}: lacks the entries {len(self._tree)} to {index - 1}; restore it from a copy")
            if index < len(self._tree):
                if self._tree.leaf(index) != leaf_hash(line):
                    raise StorageError(
                        f"{self.path}: entry {index} is not the journal's: restore it from a copy; or [outer], [codec] or "
                        "[codec.fragments] of run.toml are not those of then: set them back"
                    )
                continue
            try:
                self._write(line)
            except ValueError as error:
                raise StorageError(f"{self.path}: the journal's entry {index} does not follow ({error}); {_RESTORE}") from error
        self._begin(outer)

    def commit(
        self,
        outer: OuterState,
        records: Sequence[MergeRecord],
        staged: Mapping[int, Staged] | None,
        contributions: Mapping[int, Sequence[ContributionHeader]],
        facts: RoundFacts,
    ) -> str:
        """Return the entry of a commit that is about to be journalled; `append` it once that is done, and it is completed.

        staged: None: what the commit leads to is not known yet (`editpb.audit_log.completed`).

        Raises StorageError while the log cannot be written, RefusedError for an entry that nobody could read: nothing is to be
        committed then.
        """
        self._say_consents()
        entry = commit_entry(
            replace(facts, privacy=facts.privacy or claimed_privacy(self._config)),
            digests=(outer.digest, outer.digest_after(staged or {})),
            config=self._digest,
            records=records,
            staged=staged,
            contributions=contributions,
            taken_with=asdict(in_force(self._config, facts.outer_step - 1, facts.trained)),
            merged=self._config.audit.keep_contributions > 0,
        )
        line = entry_line(self._tree, self._now(), entry)
        heads = {peer: len(given.get("seen", ())) for peer, given in entry["contributions"].items()}
        if len(_seen_sizes(entry)) > MAX_SEEN_PROOFS:  # of many peers: MAX_SEEN_OF_PEER bounds each
            most = max(sorted(heads), key=lambda peer: heads[peer])
            raise RefusedError(f"contributions name too many heads of the audit log: {most} names {heads[most]}; evict it")
        check_length(line, entry)
        return line.decode()

    def append(self, entry: str, commit: Commit) -> None:
        """Append the entry of a commit that is journalled and applied. Raises StorageError; then `flush` tries again."""
        self._pending.append(completed(entry.encode(), commit))
        self.flush()

    def flush(self) -> None:
        """Append what is kept, and sign for it. Raises StorageError: what is left is kept."""
        while self._pending:
            if _index(self._pending[0]) != len(self._tree):
                raise LocalProtocolError(f"audit log: entry {_index(self._pending[0])} after {len(self._tree)} entries")
            self._write(self._pending[0])
            del self._pending[0]
        if self._signed != len(self._tree):
            write_atomic(self._head, self._signer.sign(len(self._tree), self._tree.root()).encode())
            self._signed = len(self._tree)
        if self._shown[0] != self._signed:
            self._shown_keys = frozenset(self._keys)
            root = self._tree.root(self._signed)
            self._shown = self._signed, self._signer.sign(self._signed, root)
            self._standing = f"{self._signed} entries, head {root.hex()[:16]}"

    def _write(self, line: bytes) -> None:
        """Append the next entry, on disk when this returns; `flush` signs for it. Raises StorageError: it is not in the log.

        Raises ValueError for a damaged one, or one that is not the next.
        """
        position = self._next(line)
        self._file.append(line)
        self._took(line, position)

    def receipt(self, outer_step: int, seen_size: int) -> LogReceipt:
        """Return the receipt of the commit to an outer step, for a peer that has seen so many entries.

        Raises GoneError where it is not in the log, or kept no longer; BusyError while its entry cannot be written.
        """
        size, note = self._shown
        commit = self._commits.get(outer_step)
        if commit is None or commit.number >= size:
            if self._pending or size < len(self):
                raise BusyError(f"the entry of outer step {outer_step} in the audit log is not written yet; ask again")
            raise GoneError(f"the commit to outer step {outer_step} is not in the audit log; take a snapshot")
        tree = self._tree
        return LogReceipt(
            entry=commit.line,
            index=commit.number,
            inclusion=tree.inclusion_proof(commit.number, size),
            checkpoint=note,
            consistency=tree.consistency_proof(seen_size, size) if seen_size <= size else (),
            seen={each: tree.consistency_proof(each, size) for each in commit.seen if each <= size},
        )

    def misfit(self, seen: SeenHead) -> tuple[str, bool]:
        """Return why this log does not begin with a head that a peer has seen, and whether the log's key has signed that head.

        The reason is empty where it does.
        """
        if seen in self._fitting:
            return "", True
        size, _ = self._shown
        text = Checkpoint(self._signer.key.name, seen.size, seen.root).text()
        if not self._signer.key.verifies(seen.signature, text):
            return "a head of the audit log that is not signed with its key", False
        if seen.size > size:
            return f"{seen.size} entries of the audit log, which has {size}", True
        if self._tree.root(seen.size) != seen.root:
            return f"another audit log of {seen.size} entries, signed with the same key", True
        self._fitting[seen] = None
        if len(self._fitting) > _MOST_FITTING:
            del self._fitting[next(iter(self._fitting))]
        return "", True

    def cosigned(self, peer_id: str, public_key: bytes, cosigned: Cosignature) -> bool:
        """Take a member's signature under a head of this log; return whether there is something new to be written.

        public_key: of the member's certificate, DER. A head that the log does not have is no news: contributions name it, too.
        Nor is one of a member whose key the log does not name yet: whoever verifies the log could not check it.

        Raises RemoteProtocolError for a signature that is not the member's, or a head that the log's key has not signed.
        """
        why, signed = self.misfit(cosigned.head)
        if why and not signed:
            raise RemoteProtocolError(f"{peer_id} cosigns {why}")
        if why or (peer_id, base64.b64encode(public_key).decode()) not in self._shown_keys:
            return False
        try:
            return self.cosignatures.add(cosigned.head, NoteKey.of_member(peer_id, public_key), cosigned.signature)
        except ValueError as error:
            raise RemoteProtocolError(f"audit.cosign: {error}") from error

    def _next(self, line: bytes) -> _Position:
        """Return what the next entry says. Raises ValueError for a damaged one, or one that is not the next."""
        entry = parse_canonical(line)
        position = _position(entry, self._last)
        if (entry.get("index"), entry.get("root")) != (len(self._tree), self._tree.root().hex()):
            raise ValueError("it does not follow the entries before it")
        return position

    def _took(self, line: bytes, position: _Position) -> None:
        """Note the next entry, which is in the log."""
        self._last, step, seen, keys = position
        self._keys |= keys
        if step:
            others = [one for one in self._commits.items() if one[0] != step]
            commit = _Commit(len(self._tree), line, seen)
            self._commits = dict([*others, (step, commit)][-self._config.kept_updates :])
        self._tree.append(leaf_hash(line))

    def score(self, scorer: str, report: ScoreReport) -> None:
        """Append what a scorer says of the last commit; its signature was checked.

        Raises StaleError when another commit has come meanwhile, StorageError: it does not count, and is not in the log. Once
        it is there it counts; until it is signed for, no other commit comes.
        """
        self._say_consents()
        if (last := self._last[1]) != report.outer_step:
            raise StaleError(f"scores of outer step {report.outer_step} come too late: the last one is {last}")
        self._say(score_entry(scorer, report))
        with contextlib.suppress(StorageError):
            self.flush()

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

    def approve(self, approver: str, approval: Approval) -> None:
        """Append an approval of a change of the configuration, unless the log has it; it is on disk when this returns.

        Raises StorageError: it is not in the log, or not signed for yet, and it is to be said again.
        """
        named = approver, approval.config_digest, approval.number
        self.flush()
        if named in self._approvals:
            return
        self._say(approval_entry(approver, approval))
        self._approvals.add(named)
        self.flush()

    def _say_consents(self) -> None:
        self.flush()
        while self._early:
            self._say(consent_entry(*self._early[0]))
            del self._early[0]
        self.flush()

    def close(self) -> None:
        """Write the cosignatures that are not on disk yet, as far as that can be done, and close the file."""
        if (notes := self.cosignatures.unsaved()) is not None:
            with contextlib.suppress(StorageError):
                self.cosignatures.write(notes)
        self._file.close()

    def _begin(self, outer: OuterState) -> None:
        """Append what is to be said of this start."""
        if not len(self._tree):
            genesis = genesis_entry(
                self._run_id, self._signer.key, self._config, outer.schema.schema_hash, outer.outer_step, outer.digest
            )
            self._say(genesis)
            if outer.outer_step:
                _log.warning("%s: begins at outer step %d: no commit before is in it", self.path, outer.outer_step)
        self.flush()  # before a second entry
        config, outer_step, digest = self._last
        if config != self._digest:
            self._say(config_entry(self._config))
        if (outer_step, digest) != (outer.outer_step, outer.digest):
            self._say(continued_entry(outer.outer_step, outer.digest))
        self._say_consents()

    def _say(self, entry: Mapping[str, object]) -> None:
        """As `_write`, an entry that is none of a commit; none of those is pending."""
        self._write(entry_line(self._tree, self._now(), entry))

    def _read(self) -> None:
        """Open the file and read what is there. Raises StorageError."""
        self._tree, self._last = MerkleTree(), ("", 0, "")

        def take(line: bytes) -> None:
            self._took(line, self._next(line))
            self._consents |= _consent_in(line)
            self._approvals |= _approval_in(line)

        try:
            self._file.read(take)
        except ValueError as error:
            raise StorageError(f"{self.path}: entry {len(self._tree)} is damaged ({error}); {_RESTORE}") from error

    def _check_head(self) -> None:
        try:
            text, _ = open_note(self._head.read_bytes(), [self._signer.key])
            head = parse_checkpoint(text)
        except FileNotFoundError:
            if len(self._tree) > 1:
                why = f"is missing, and {self.path.name} has {len(self._tree)} entries"
                raise StorageError(f"{self._head}: {why}; {_RESTORE}") from None
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

    def _check_kept(self, kept: Mapping[str, object]) -> None:
        """Raise StorageError where a checkpoint was written with entries, signed with the key of now, that are not here."""
        entries = kept.get("entries") if kept.get("key") == self.key else 0
        if not isinstance(entries, int) or entries > len(self._tree):
            why = f"has {len(self._tree)} of the {entries} entries that the run's checkpoint was written with"
            anew = f"or, to begin another log with another key, move {self._head.stem}.* and log.key away"
            raise StorageError(f"{self.path}: {why}; {_RESTORE}, {anew}")

    def _check_cosigned(self) -> None:
        """Hold the log to the heads that members have cosigned. Raises StorageError."""
        for path, head in self.cosignatures.load().items():
            if head.size > len(self._tree):
                why = f"has {len(self._tree)} of the {head.size} entries that members have cosigned ({path})"
                raise StorageError(f"{self.path}: {why}; restore it from a copy")
            if self._tree.root(head.size) != head.root:
                raise StorageError(f"{self.path}: is not what members have cosigned ({path}); restore it from a copy")


def _index(line: bytes) -> int:
    try:
        return int(parse_json(line)["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"the journal: an entry of the audit log is damaged ({error!r})") from error


def _consent_in(line: bytes) -> set[tuple[str, str, str]]:
    """Return peer, configuration and policy of a consent's entry; of no other. The entry was read before."""
    if b'"kind":"consent"' not in line:
        return set()
    entry = parse_json(line)
    return {(str(entry["peer"]), str(entry["config_digest"]), str(entry["policy_digest"]))} if "peer" in entry else set()


def _approval_in(line: bytes) -> set[tuple[str, str, int]]:
    """Return approver, configuration and its number of an approval's entry; of no other. The entry was read before."""
    if b'"kind":"approval"' not in line:
        return set()
    entry = parse_json(line)
    is_one = entry["kind"] == "approval"
    return {(str(entry["approver"]), str(entry["config_digest"]), int(entry["number"]))} if is_one else set()


def _seen_sizes(entry: Mapping[str, Any]) -> frozenset[int]:
    """Return the sizes of the heads that the contributions of a commit name."""
    return frozenset(int(head[0]) for given in entry["contributions"].values() for head in given.get("seen", ()))


class _Position(NamedTuple):
    """What an entry says that the next ones are written by."""

    last: tuple[str, int, str]  # configuration, outer step and digest after it
    step: int = 0  # the outer step that it commits; 0: it is no commit
    seen: frozenset[int] = frozenset()  # sizes of the heads that it names
    keys: frozenset[tuple[str, str]] = frozenset()  # members, and their public keys in base64


def _position(entry: Any, before: tuple[str, int, str]) -> _Position:
    """Return what an entry says. before: configuration, outer step and digest before it. Raises ValueError: it is damaged."""
    config, outer_step, digest = before
    try:
        match entry["kind"]:
            case "commit":
                return _Position(
                    (entry["config_digest"], entry["outer_step"], entry["after"]),
                    int(entry["outer_step"]),
                    _seen_sizes(entry),
                    frozenset((str(peer), str(given["key"])) for peer, given in entry["contributions"].items()),
                )
            case "genesis":
                return _Position((entry["config_digest"], entry["outer_step"], entry["digest"]))
            case "config":
                return _Position((entry["config_digest"], outer_step, digest))
            case "score":
                return _Position(before, keys=frozenset({(str(entry["scorer"]), str(entry["key"]))}))
            case "consent":
                return _Position(before, keys=frozenset({(str(entry["peer"]), str(entry["key"]))}))
            case "approval":
                return _Position(before)
            case "continued":
                return _Position((config, entry["outer_step"], entry["digest"]))
            case kind:
                raise ValueError(f"is of an unknown kind {kind!r}; a later version wrote it")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(repr(error)) from error
