"""The outer state on disk: founding, journal, checkpoints, recovery, and the published updates that late peers still need.

Files are written in an order in which a SIGKILL between any two writes loses no committed step. The published updates are
written before each checkpoint and belong to it: after a restart a peer that missed commits can still take them one by one, and
a peer that does not know whether its contribution was merged when the process died learns that it was.

Runs in the worker thread; published updates are looked up and published on the event loop, too, and merged fragments come from
several threads where there are more. The journal is written by a thread of its own, beside the computation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from aggregator.storage import checkpoint
from aggregator.storage import published_updates as updates
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.configurations import configurations_of
from aggregator.storage.high_water import read_mark
from aggregator.storage.journal import FORMAT, CommittedRound, Disk, Journal, Span, read_round, replay_segments, rounds_in
from aggregator.storage.kept_contributions import KeptContributions
from aggregator.storage.part_log import PartLog
from aggregator.storage.pending_injection import Injections
from aggregator.storage.state_folder import StateFolder
from edit import plugins
from edit.config.in_force import in_force
from edit.config.plugins import AGREED
from edit.config.run import RunConfig
from edit.durable_files import names_in, read_json, write_json
from edit.errors import ConfigError, EditError, RefusedError, StorageError
from edit.fragments.schema import Schema
from edit.merging.injection import Injected, Injection
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.merging.trust import Trust
from edit.plain_text import reason_of
from edit.records import MOST_TOKENS, Commit, round_number
from edit.trust.merkle import HASH_BYTES, MOST_PROOF
from editpb.audit_log import DAMAGE, RoundFacts, completed
from editpb.messages import Consent, ContributionHeader, SeenHead

__all__ = ["Entries", "Store", "load_outer", "peaks_from", "read_outer"]

FORKED_FORMAT = 1  # of the note that a state is kept though others went on without it
FORKED = "forked.json"

_log = logging.getLogger(__name__)
Restore = Callable[[Schema, RunConfig, Mapping[str, Tensor], Mapping[str, Any]], OuterState]


class Entries(Protocol):
    """Makes the entries of commits for an audit log; knows what of it others may have seen."""

    @property
    def of_results(self) -> bool:
        """Whether an entry has what its commit leads to from the beginning, which is then to be staged; else that is added."""
        ...

    def commit(
        self,
        outer: OuterState,
        records: Sequence[MergeRecord],
        staged: Mapping[int, Staged] | None,
        contributions: Mapping[int, Sequence[ContributionHeader]],
        facts: RoundFacts,
    ) -> str:
        """See `AuditLog.commit`."""
        ...

    def misfit(self, seen: SeenHead) -> tuple[str, bool]:
        """See `AuditLog.misfit`."""
        ...

    def consent(self, peer_id: str, consent: Consent) -> None:
        """See `AuditLog.consent`."""
        ...


class Store:
    """One run's outer state in a folder.

    Args:
        disk: the journal's disk, or what a test has in its place.
        restore: makes the state of a checkpoint, as `OuterState.restore`.
        audit: the run's audit log; None: it has none.
        kept: keeps the contributions behind the last outer steps; None: nobody does.
        part_log: in a swarm, the audit log of the part; None: the run has none.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        run_id: str,
        disk: Disk | None = None,
        restore: Restore = OuterState.restore,
        audit: AuditLog | None = None,
        kept: KeptContributions | None = None,
        part_log: PartLog | None = None,
    ) -> None:
        self.audit, self.part_log = audit, part_log
        self.kept = kept
        self.tokens = 0  # merged so far, as far as it is on disk
        self.update_id = ""  # in a swarm: the update that led to the state that is on disk; "": none did
        self.held: CommittedRound | None = None  # what `recover` found held in a swarm, not applied (rule 7 of the journal)
        self._held_entry = ""  # of the audit log, of what is held now
        self._draft = ""  # the entry of the commit that is on disk and not applied
        self.injections = Injections(folder)
        self._folder, self._config, self._run_id, self._disk, self._restore = folder, config, run_id, disk, restore
        self._journal: Journal | None = None
        self._written: dict[Path, Mapping[int, Span]] = {}  # where the rounds of the segments before it are, as far as is known
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")  # all that is done to it, in order
        self._open_round: int | None = None  # 0: none is open; None: nobody says which is
        self._writing: Future[None] | None = None
        self._beginning = threading.Lock()  # held while it changes
        self._noting: Future[None] | None = None
        self._updates: dict[int, Commit] = {}  # replaced, never changed: the event loop reads it, too

    @property
    def entries(self) -> Entries | None:
        """What makes the entries of commits; None: there is no audit log."""
        return self.audit

    # ---- the published updates ---------------------------------------------------------------------------------------------

    @property
    def oldest_update(self) -> int:
        """The smallest outer step that an update is kept TO; 0 when none is."""
        return next(iter(self._updates), 0)

    def update(self, outer_step: int) -> Commit | None:
        """Return the published update TO this outer step, or None when it is not kept."""
        return self._updates.get(outer_step)

    def publish(self, commit: Commit) -> None:
        """Keep this update for the peers; forget the oldest beyond the configured number."""
        kept = [*self._updates.values(), commit][-self._config.kept_updates :]
        self._updates = {one.outer_step: one for one in kept}

    # ---- writing -----------------------------------------------------------------------------------------------------------

    def found(self, outer: OuterState) -> None:
        """Write the first state of the run. Raises StorageError: the run is not founded, and nothing of this state stays.

        A file that was there before, and could not be replaced, stays.
        """
        if self.audit is not None:
            self.audit.attach((), outer)
        if self.part_log is not None:
            self.part_log.found(outer)
        before = set(names_in(self._folder))
        try:
            self.checkpoint(outer)
        except StorageError:
            with contextlib.suppress(OSError):  # what cannot be removed is replaced by the next founding
                for path_of in (checkpoint.segment_of, checkpoint.path_of):  # in this order: no segment without its checkpoint
                    if (path := path_of(self._folder, outer.outer_step)).name not in before:
                        path.unlink(missing_ok=True)
            raise

    def round_opened(self, round_id: int) -> None:
        """Say which round is open; 0: none. What is merged of another one comes too late, and is not kept. On one thread."""
        self._open_round = round_id

    def check_open(self, round_id: int) -> None:
        """Raise RefusedError for a round that is over. From any thread.

        What is written after this returns, before anything of a round that opens later can be, is in its place.
        """
        if self._open_round not in (None, round_id):
            raise RefusedError(f"round {round_number(round_id)} is over")

    def prove_room(self, count: int) -> None:
        """Prove that so many bytes of a round can be written, before the first of its fragments is. Raises StorageError."""
        if self.audit is not None:
            self.audit.flush()  # nothing is committed until it can be
        self._writer.submit(lambda: self._open_journal().prove_room(count)).result()

    def begin_fragment(self, round_id: int, record: MergeRecord, injection: Injection | None = None) -> Future[None]:
        """Begin to write one merged fragment of a round. From any thread.

        Waits until the fragment before is written, so that no more than one is kept in memory for it. A commit must wait for
        the futures of all its fragments, which may raise StorageError, and RefusedError for a round that is over.
        """

        def append() -> None:
            self.check_open(round_id)
            self._open_journal().append_fragment(round_id, record, injection)

        with self._beginning:
            if self._writing is not None:
                wait([self._writing])
            self._writing = self._writer.submit(append)
            return self._writing

    def append_commit(
        self,
        round_id: int,
        outer_step: int,
        reason: str,
        tokens: int = 0,
        injected: Injected | None = None,
        base: str = "",
        audit: str = "",
        inner_steps: int = 0,
        trust: Mapping[str, Trust] | None = None,
        fragments: Collection[int] | None = None,
    ) -> None:
        """Commit the round; it is on disk when this returns. Raises StorageError: the round is not committed.

        Args:
            tokens: merged with it; the sum stays at MOST_TOKENS.
            injected: what of a run above is in the outer state after it, when an injection came in; else None.
            base: digest of the outer parameters before it, which a recovery must come to, too.
            audit: its entry in the audit log, as `entries` has made it; `applied` completes and appends it.
            inner_steps: behind `tokens`; 0: not known.
            trust: what scorers have said of peers until then; None: nothing new.
            fragments: that it must have; None: what has been written of it.
        """
        if self._noting is not None:
            self._noting.result()  # done long ago; a bug in it is raised
        total, said = min(self.tokens + tokens, MOST_TOKENS), self._in_force(outer_step, (inner_steps, tokens))
        self._writer.submit(
            lambda: self._open_journal().append_commit(
                round_id,
                outer_step,
                reason,
                total,
                injected,
                base,
                draft=audit,
                in_force=said,
                trust=trust,
                fragments=fragments,
            )
        ).result()
        self.tokens, self._draft = total, audit

    def hold(self, round_id: int, outer_step: int, reason: str, base: str, update: Mapping[str, Any], audit: str = "") -> None:
        """In a swarm: commit the round, held only until `adopted`. It is on disk when this returns. Raises StorageError.

        update: what the members agree on, as JSON values: `id`; `tokens`, merged in all; and what the caller needs. audit: as
        `append_commit`; it is appended to the log when the round is adopted.
        """
        if self._noting is not None:
            self._noting.result()
        said = self._in_force(outer_step)
        self._writer.submit(
            lambda: self._open_journal().append_commit(
                round_id, outer_step, reason, update["tokens"], None, base, update, audit, in_force=said
            )
        ).result()
        self._held_entry = audit

    def _in_force(self, outer_step: int, trained: tuple[int, int] = (0, 0)) -> dict[str, object] | None:
        """Return what the commit to this outer step is taken with; None with gossip, which has no outer optimizer."""
        return asdict(in_force(self._config, outer_step - 1, trained)) if self._config.outer.algorithm == "mean" else None

    def take_back(self) -> None:
        """Give up the round that is held: nothing of it stays."""
        self._held_entry = ""
        self._writer.submit(lambda: self._open_journal().take_back()).result()

    def adopted(self, commit: Commit, update: Mapping[str, Any]) -> None:
        """What was held has been applied."""
        self.tokens, self.update_id = update["tokens"], update["id"]
        self.applied(commit)
        if self.part_log is not None:
            entry, self._held_entry = self._held_entry, ""
            try:
                self.part_log.append(entry)
            except StorageError as error:
                _log.error("%s; no further update is held until it can", error)

    def committed(self, outer_step: int) -> CommittedRound | None:
        """Return the round TO this outer step from the journal, or None when it is not kept."""
        if self._noting is not None:
            self._noting.result()
        before = [(base, path) for base, path in checkpoint.segments(self._folder) if base < outer_step]
        if not before:
            return None
        base, path = before[-1]
        span = self._rounds_in(base, path).get(outer_step)
        return read_round(path, span, outer_step) if span is not None else None

    def _rounds_in(self, base: int, path: Path) -> Mapping[int, Span]:
        """Return where the committed rounds of a segment are. One from before this process is read, once."""

        def written() -> Mapping[int, Span] | None:
            return dict(self._journal.rounds) if self._journal is not None and self._journal.path == path else None

        if (now := self._writer.submit(written).result()) is not None:
            return now
        if path not in self._written:
            self._written[path] = rounds_in(path, base)
        return self._written[path]

    def applied(self, commit: Commit) -> None:
        """Publish a commit that is on disk, and note the digest that it led to: a recovery will have to come to the same.

        Its entry is appended to the audit log before.
        """
        draft, self._draft = self._draft, ""
        if self.audit is not None and draft:
            try:
                self.audit.append(draft, commit)
            except StorageError as error:
                _log.error("%s; no further round commits until it can", error)
        self.publish(commit)
        self._noting = self._writer.submit(self._note_digest, commit.outer_step, commit.digest)

    def _note_digest(self, outer_step: int, digest: str) -> None:
        try:
            self._open_journal().append_digest(outer_step, digest)
        except StorageError as error:
            _log.warning("%s; the journal lacks the digest of outer step %d", error, outer_step)

    def begin_segment(self, outer_step: int) -> None:
        """Begin the segment of the checkpoint that will follow this commit, before another round writes. If that fails, the
        checkpoint says why."""
        if self._journal is not None:
            with contextlib.suppress(StorageError):
                self._begin_segment(outer_step)

    def checkpoint(self, outer: OuterState) -> None:
        """Write the whole state and begin a new journal segment. Raises StorageError; the journal goes on.

        The segment is begun first: once the checkpoint exists, no later commit may go into a segment before it, which a
        recovery from this checkpoint does not read. Only the founding has no checkpoint to fall back to yet. A segment in which
        a round is under way is not left: then there is no checkpoint.
        """
        if not checkpoint.path_of(self._folder, outer.outer_step).exists() or self._journal is None:
            self._write_checkpoint(outer)

    def _write_checkpoint(self, outer: OuterState) -> None:
        if self.audit is not None:
            self.audit.flush()  # a segment whose entries the log lacks must not go
        if self.part_log is not None:
            self.part_log.flush()  # likewise
        founded = self._journal is not None
        if founded:
            self._begin_segment(outer.outer_step)
        metadata = {
            **outer.metadata(),
            "run_id": self._run_id,
            "tokens": self.tokens,
            "schema": outer.schema.to_json(),
        }
        if self.update_id:
            metadata["update_id"] = self.update_id
        if self.audit is not None:
            metadata["log"] = self.audit.kept
        if self.part_log is not None:
            metadata["audit"] = [each.hex() for each in self.part_log.tree.peaks]
        if self._updates:
            updates.save(checkpoint.updates_of(self._folder, outer.outer_step), list(self._updates.values()))
        keep, replayable = self._config.storage.keep_checkpoints, self._config.audit.keep_contributions
        checkpoint.save(self._folder, outer.to_tensors(), metadata, keep=keep, replayable=replayable)
        if not founded:
            self._begin_segment(outer.outer_step)

    def replace(self, outer: OuterState, peaks: Sequence[bytes] = ()) -> None:
        """Write a state that came from elsewhere, in place of the one here. Raises StorageError: `recover` is needed then.

        peaks: of the tree that its audit log goes on from (`PartLog.begin`, which may raise RemoteProtocolError: likewise).
        """
        self._close_journal()
        self._updates, self._written, self._held_entry = {}, {}, ""
        if self.part_log is not None:
            self.part_log.begin(outer, peaks)
        try:
            for path_of in (checkpoint.segment_of, checkpoint.updates_of):  # they follow, and led to, another state
                path_of(self._folder, outer.outer_step).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written ({error.strerror})") from error
        self.checkpoint(outer)

    @property
    def forked(self) -> str:
        """The name of the state that `mark_forked` was told last; '': none. Raises StorageError, FormatError."""
        path = self._folder / FORKED
        try:
            return str(read_json(path, version=FORKED_FORMAT)["name"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{path}: cannot be read ({reason_of(error)})") from error

    def mark_forked(self, name: str) -> None:
        """Note, of a part of a swarm, that the state of this name is kept though others went on without it.

        The note means nothing once the state has another name. Raises StorageError, FormatError.
        """
        if self.forked != name:
            write_json(self._folder / FORKED, {"name": name}, version=FORKED_FORMAT)

    def _begin_segment(self, outer_step: int) -> None:
        path = checkpoint.segment_of(self._folder, outer_step)

        def begin() -> None:
            before = self._journal
            if before is not None and before.path == path:
                return
            if before is not None and before.round_id and before.round_id == self._open_round:
                raise StorageError(f"{before.path}: a round is under way in it")
            self._turn_to(Journal.create(path, outer_step, self._disk))

        self._writer.submit(begin).result()

    def close(self) -> None:
        """Close the journal, and the audit log."""
        if self.audit is not None:
            self.audit.close()
        if self.part_log is not None:
            self.part_log.close()
        self._close_journal()

    def _close_journal(self) -> None:
        self._writer.submit(self._turn_to, None).result()

    def _turn_to(self, journal: Journal | None) -> None:
        before, self._journal = self._journal, journal
        if before is not None:
            before.close()
            kept = {path for _, path in checkpoint.segments(self._folder)}
            self._written = {path: rounds for path, rounds in self._written.items() if path in kept}
            self._written[before.path] = before.rounds

    def _open_journal(self) -> Journal:
        if self._journal is None:
            raise StorageError(f"{self._folder}: the journal is not open")
        return self._journal

    # ---- reading -----------------------------------------------------------------------------------------------------------

    def recover(self, check: Callable[[OuterState | None], None] = lambda found: None) -> OuterState | None:
        """Return the state of the last commit, bit for bit, and keep the updates before it; None: the run was never founded.

        check: is given that, before anything is written. Raises StorageError for damage that loses a committed step,
        ConfigError when the folder is another run's; as `check`.
        """
        loaded = _load(self._folder, self._config, self._run_id, restore=self._restore)
        check(loaded.outer if loaded is not None else None)
        if loaded is None:
            return None
        self.tokens, self.update_id, self.held = loaded.tokens, loaded.update_id, loaded.held
        self._held_entry = loaded.held.audit if loaded.held is not None else ""
        self.injections.recover(loaded.outer.injected)
        for commit in [*self._load_updates(loaded.begun_with), *loaded.commits]:
            self.publish(commit)
        said = False  # whether the checkpoint says what entries the log has
        if self.audit is not None:
            said = loaded.log.get("key") == self.audit.key
            anew = not said and "key" in loaded.log  # moved away with its key: the journal's entries are of that one
            self.audit.attach(() if anew else loaded.entries, loaded.outer, loaded.log)
        if self.part_log is not None:
            self.part_log.attach(loaded.peaks, loaded.begun_with + 1, loaded.entries, self._held_entry, loaded.outer)
        self._journal = self._go_on(loaded.base)
        if self.audit is not None and not said:
            self._write_checkpoint(loaded.outer)  # from here on the journal's entries are of this log
        return loaded.outer

    def _load_updates(self, outer_step: int) -> list[Commit]:
        """Read the updates that belong to the checkpoint of `outer_step`. Without them peers take snapshots.

        There is no file where none were kept: the first state, and one that came from elsewhere.
        """
        path = checkpoint.updates_of(self._folder, outer_step)
        try:
            return updates.load(path, outer_step) if path.exists() else []
        except StorageError as error:
            _log.warning("%s; peers that missed an update before outer step %d take a snapshot", error, outer_step + 1)
            return []

    def _go_on(self, base: int) -> Journal:
        segment = checkpoint.segment_of(self._folder, base)
        if not segment.exists():
            return Journal.create(segment, base, self._disk)
        journal = Journal.open(segment, base, self._disk)
        if journal.cut is not None:
            _log.warning("%s: cut off %d bytes: %s", segment, journal.cut.cut_bytes, journal.cut.reason)
        if journal.format == FORMAT:
            return journal
        journal.close()
        if journal.outer_step == base:  # it has no commit
            segment.unlink()
        return Journal.create(checkpoint.segment_of(self._folder, journal.outer_step), journal.outer_step, self._disk)


def load_outer(folder: StateFolder) -> OuterState:
    """Read the outer state of the last commit; change nothing.

    Raises ConfigError where the run has none yet, or lost it, StorageError.
    """
    found = read_outer(folder.outer, configurations_of(folder).config, folder.run_id)
    if found is not None:
        return found
    if (mark := read_mark(folder.high_water)) is None:
        raise ConfigError(f"{folder.path}: the run has no parameters yet; they come with its first peer")
    raise ConfigError(
        f"{folder.path}: holds no outer step, but outer step {mark.outer_step} was committed; "
        "restore the folder outer from a copy"
    )


def read_outer(path: Path, config: RunConfig, run_id: str, at: int | None = None) -> OuterState | None:
    """Read the outer state of the last commit in the folder of a store, None in a new one; change nothing.

    Another process may write there meanwhile. at: an earlier outer step, whose state is read instead. Raises ConfigError,
    StorageError (also where no checkpoint so old is kept).
    """
    plugins.admit(config, plugins.pinned(config), AGREED)
    loaded = _load(path, config, run_id, tidy=False, at=at)
    return loaded.outer if loaded is not None else None


class _Loaded(NamedTuple):
    """What a recovery found."""

    outer: OuterState
    begun_with: int  # the outer step of the checkpoint
    commits: list[Commit]  # the last ones after the checkpoint
    base: int  # the outer step that the newest journal segment follows
    tokens: int  # merged so far
    update_id: str  # in a swarm: the update that led to it
    held: CommittedRound | None  # in a swarm: held only, not applied
    entries: tuple[str, ...]  # of the audit log, after the checkpoint
    peaks: tuple[bytes, ...]  # in a swarm: of the tree of those until the checkpoint
    log: dict[str, object]  # of a coordinator: what the checkpoint says of the log (`AuditLog.kept`)


def _load(
    folder: Path,
    config: RunConfig,
    run_id: str,
    *,
    tidy: bool = True,
    restore: Restore = OuterState.restore,
    at: int | None = None,
) -> _Loaded | None:
    recovered = checkpoint.recover(folder, tidy=tidy, at=at)
    if recovered is None:
        return None
    for note in recovered.notes:
        _log.warning("%s", note)
    metadata = recovered.metadata
    if metadata.get("run_id") != run_id:
        raise ConfigError(f"{recovered.path}: belongs to run {metadata.get('run_id')}, not {run_id}")
    try:
        outer = restore(Schema.from_json(metadata["schema"]), config, recovered.tensors, metadata)
        tokens, peaks, log = int(metadata["tokens"]), peaks_from(metadata.get("audit", ())), dict(metadata.get("log", {}))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"{recovered.path}: is damaged ({error!r})") from error
    commits: deque[Commit] = deque(maxlen=config.kept_updates)
    update_id = str(metadata.get("update_id", ""))
    held: CommittedRound | None = None
    entries: list[str] = []

    def take(committed: CommittedRound) -> None:
        nonlocal tokens, update_id
        commits.append(_apply(outer, committed))
        tokens = committed.tokens
        if entry := _entry(committed, commits[-1]):
            entries.append(entry)
        update_id = str(committed.update["id"]) if committed.update is not None else update_id

    for committed in replay_segments(recovered.segments, recovered.outer_step, recovered.at_least):
        if at is not None and committed.outer_step > at:
            break
        if held is not None:
            take(held)  # another one follows: it became an outer step, though its digest was not noted
        held = committed if committed.update is not None and not committed.digest else None
        if held is None:
            take(committed)
    outer.residual_form = config.codec.down_residual
    base = max([recovered.outer_step, *(base for base, _ in recovered.segments)])
    tokens = min(tokens, MOST_TOKENS)
    return _Loaded(outer, recovered.outer_step, list(commits), base, tokens, update_id, held, tuple(entries), peaks, log)


def peaks_from(written: Any) -> tuple[bytes, ...]:
    """Return the hashes that a tree goes on from, as they are written. Raises ValueError, TypeError for what are none."""
    peaks = tuple(bytes.fromhex(each) for each in written)
    if len(peaks) > MOST_PROOF or any(len(each) != HASH_BYTES for each in peaks):
        raise ValueError("these are no hashes of a tree")
    return peaks


def _apply(outer: OuterState, committed: CommittedRound) -> Commit:
    """Replay one journalled round through the same code that committed it."""
    try:
        outer.residual_form = committed.residual_form or outer.config.codec.down_residual
        if committed.base:
            _check_digest(committed.outer_step - 1, committed.base, outer.digest)
        commit = outer.commit(
            committed.round_id, committed.reason, list(committed.fragments), committed.injection, None, committed.trust
        )
        if committed.digest:
            _check_digest(committed.outer_step, committed.digest, commit.digest)
        return commit
    except ConfigError:
        raise
    except EditError as error:
        raise StorageError(f"journal: outer step {committed.outer_step} cannot be replayed ({error})") from error


def _entry(committed: CommittedRound, commit: Commit) -> str:
    """Return the entry in the audit log of a round that was replayed; empty: there was no log. Raises StorageError."""
    if not committed.draft:
        return committed.audit
    try:
        return completed(committed.draft.encode(), commit).decode()
    except DAMAGE as error:
        raise StorageError(f"the journal: the entry of outer step {commit.outer_step} is damaged ({error!r})") from error


def _check_digest(outer_step: int, then: str, now: str) -> None:
    if now != then:
        raise ConfigError(
            f"outer step {outer_step} was committed with digest {then[:12]}, and with the settings of now it has {now[:12]}: "
            "set [outer], [codec] and [codec.fragments] of run.toml back, start and stop the coordinator (SIGTERM), and then "
            "change them"
        )
