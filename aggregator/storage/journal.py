"""The journal: merged fragments and commits, appended record by record, so that a kill at any moment loses no committed step.

1. A file is one segment: the commits that follow the checkpoint of `base_outer_step`. Its first record names that step and the
   format.
2. A round is written as its fragments, then its commit, then fsync. A fragment counts only with the commit of its round after
   it.
3. What follows the last commit is cut off when the segment is opened: a record torn by a crash, or the fragments of a round
   that was never committed.
4. A bad record with a good one after it is not torn, it is damaged: StorageError.
5. A round that is given up leaves no trace: its records are cut off when the next round writes. No round is in two segments.
   Nothing is written while `path` does not name the open file, because its folder was moved away or removed: a restart would
   not find it.
6. A commit is on disk before it is applied, so it names the digest before it. The digest after it follows as a record of its
   own, which becomes durable with the next commit: it may be missing after the last one.
7. In a swarm a commit names the update that it holds (`CommittedRound.update`). As long as no digest follows it, it is held
   only, and may be taken back: the record that the members agree on decides whether it becomes an outer step.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from aggregator.storage.journal_records import (
    BadRecord,
    Buffer,
    Record,
    body_of,
    fragment_header,
    fragment_of,
    frame,
    good_record_after,
    records,
)
from edit.durable_files import check_format, sync
from edit.errors import LocalProtocolError, StorageError
from edit.merging.injection import Injected, Injection
from edit.merging.outer_state import MergeRecord
from edit.merging.trust import Trust

__all__ = ["CommittedRound", "Cut", "Disk", "Journal", "Span", "read_round", "replay", "replay_segments", "rounds_in"]

# 2: norm statistics of the detector "level", and the slots of buffers are gone; 3: its forecasts; 4: what was merged is
# encoded, and a commit names the digest before it
FORMAT = 4
OLDER = (3,)  # formats that can be replayed, but not added to
_PIECE_BYTES = 1 << 20  # that are written at a time to prove that there is room
_RESERVE: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)  # macOS has none
Span = tuple[int, int]
"""Where in its segment a committed round begins, and ends with its commit, or its digest."""


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """One committed round."""

    round_id: int
    outer_step: int  # the one that it advanced the run TO
    reason: str
    fragments: tuple[MergeRecord, ...]  # by fragment_id
    tokens: int  # merged so far, in all
    base: str = ""  # digest of the outer parameters before it; empty until format 3
    digest: str = ""  # of those after it; empty when it is not known
    residual_form: str = ""  # in which the residuals of then were kept; empty: as configured
    injection: Injection | None = None  # what of a run above came in with it; what it was computed for (`base`) is not kept
    update: Mapping[str, Any] | None = None  # in a swarm: the update that its members agree on; JSON values
    audit: str = ""  # its entry in the audit log; empty: there was no log
    draft: str = ""  # that entry without what the commit leads to, which a replay finds (`editpb.audit_log.completed`)
    trust: Mapping[str, Trust] | None = None  # what scorers have said of peers until then; None: nothing new


@dataclass(frozen=True, slots=True)
class Cut:
    """What opening a segment cut off its end."""

    cut_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disk:
    """The calls that a full or dying disk fails; a test has others in their place."""

    write: Callable[[int, memoryview], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    reserve: Callable[[int, int, int], None] | None = _RESERVE  # of a file, from a byte on, so many bytes


class Journal:
    """One segment, open for appending by one thread. Make it with `create` or `open`; an older `format` is not added to."""

    def __init__(self, path: Path, descriptor: int, disk: Disk, survey: _Survey) -> None:
        self.path = path
        self.cut = survey.cut
        self._descriptor = descriptor
        self._disk = disk
        self._outer_step = survey.outer_step
        self.format = survey.format
        self.rounds = dict(survey.rounds)  # by the outer step that each leads to
        self._durable = survey.end  # the file up to here is on disk
        self._committed = survey.end  # what follows is cut off when its round is given up; a digest before it is kept
        self._end = survey.end  # the file up to here is whole
        self._before_last = survey.before_last  # where the last commit's round begins, while no digest follows it
        self._torn = False  # bytes behind _end could not be cut off
        self._failed = False  # a write or a sync has failed since the last sync
        self._round_id = 0
        self._fragments: set[int] = set()

    @classmethod
    def create(cls, path: Path, base_outer_step: int, disk: Disk | None = None) -> Journal:
        """Make the segment that follows the checkpoint of `base_outer_step`. Raises StorageError, also when the file exists."""
        disk = disk or Disk()
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be created ({error.strerror})") from error
        journal = cls(path, descriptor, disk, _Survey(0, base_outer_step, None, FORMAT, None, {}))
        try:
            journal._begin(base_outer_step)
        except StorageError:
            journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    @classmethod
    def open(cls, path: Path, base_outer_step: int, disk: Disk | None = None) -> Journal:
        """Open a segment for appending; cut off what follows its last commit (`cut` says how much and why).

        What is kept is on disk when this returns, also what a killed process had written and not synced: peers are about to be
        told of it. Raises StorageError for damage, with file and offset, and for a segment of another base; FormatError.
        """
        survey = _survey(path, base_outer_step)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
            os.ftruncate(descriptor, survey.end)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened for writing ({error.strerror})") from error
        journal = cls(path, descriptor, disk or Disk(), survey)
        try:
            if survey.end == 0:  # torn while it was created
                journal._begin(base_outer_step)
            else:
                journal._make_durable()
        except StorageError:
            journal.close()
            raise
        return journal

    @property
    def outer_step(self) -> int:
        """The last committed outer step of this segment, or its base."""
        return self._outer_step

    @property
    def round_id(self) -> int:
        """The round that has fragments here and no commit; 0: there is none."""
        return self._round_id

    @property
    def size(self) -> int:
        """Bytes of whole records."""
        return self._end

    def append_fragment(self, round_id: int, record: MergeRecord, injection: Injection | None = None) -> None:
        """Write one merged fragment of a round, and what is injected with it. Not yet durable.

        Raises StorageError: the file ends with the last whole record again, the next append works when the disk does.
        """
        self._check_step(record.outer_step + 1)
        if round_id != self._round_id:
            self._give_up_round()
        self._append(fragment_header(round_id, record, injection), *body_of(record, injection))
        self._round_id = round_id
        self._fragments.add(record.fragment_id)

    def append_commit(
        self,
        round_id: int,
        outer_step: int,
        reason: str,
        tokens: int = 0,
        injected: Injected | None = None,
        base: str = "",
        update: Mapping[str, object] | None = None,
        audit: str = "",
        draft: str = "",
        in_force: Mapping[str, object] | None = None,
        trust: Mapping[str, Trust] | None = None,
        fragments: Collection[int] | None = None,
    ) -> None:
        """Commit the fragments of this round; they and the commit are on disk when this returns. tokens: merged so far, in all.

        fragments: which ones they must be, or a replay could not take the step; None: whatever has been written.

        base: digest of the outer parameters before it; a replay must come to the same. update: rule 7. audit, draft:
        `CommittedRound`. in_force: what it was taken with (`edit.config.in_force`), to be read by people.
        trust: what scorers have said of peers until then; None: nothing new. Raises StorageError.
        """
        self._check_step(outer_step)
        if round_id != self._round_id or not self._fragments:
            raise LocalProtocolError(f"journal: commit of round {round_id} without its fragments")
        if fragments is not None and self._fragments != set(fragments):
            wrong = f"of fragments {sorted(fragments)}, of which {sorted(self._fragments)} are written"
            raise LocalProtocolError(f"journal: commit of round {round_id} {wrong}")
        header = {"kind": "commit", "round_id": round_id, "outer_step": outer_step, "reason": reason, "tokens": tokens}
        header["base"] = base
        header["injected"] = injected.to_json() if injected is not None else None
        if update is not None:
            header["update"] = update
        if audit:
            header["audit"] = audit
        if draft:
            header["audit_draft"] = draft
        if in_force is not None:
            header["in_force"] = in_force
        if trust is not None:
            header["trust"] = {peer_id: each.to_json() for peer_id, each in trust.items()}
        begins = self._committed
        self._append({**header, "fragments": sorted(self._fragments)})
        self._make_durable()
        self._outer_step, self._round_id, self._before_last = outer_step, 0, begins
        self.rounds[outer_step] = begins, self._end
        self._fragments.clear()

    def append_digest(self, outer_step: int, digest: str) -> None:
        """Write the digest after the last commit, which was to `outer_step`. Not yet durable. Raises StorageError."""
        if outer_step != self._outer_step or self._fragments:
            raise LocalProtocolError(f"journal: the digest of outer step {outer_step} after {self._outer_step}")
        self._append({"kind": "digest", "outer_step": outer_step, "digest": digest})
        self._committed, self._before_last = self._end, None
        if outer_step in self.rounds:
            self.rounds[outer_step] = self.rounds[outer_step][0], self._end

    def prove_room(self, count: int) -> None:
        """Prove that so many bytes can be written behind the last commit: a file without a name, in the same folder, gets them.

        They are reserved and given back at once. After a failed write or sync, and where nothing can be reserved, they are
        written and synced, too. What an uncommitted round has left is given up. A kill in between leaves nothing.
        count: at least 1. Raises StorageError: nothing more is to be written now.
        """
        self._give_up_round()
        self._mend()
        try:
            with tempfile.TemporaryFile(dir=self.path.parent) as scratch:
                # where the round would lie in this segment: no file may be larger than its file system, or a limit, allows
                if not self._reserve(scratch.fileno(), self._end, count) or self._failed:
                    self._try_out(scratch.fileno(), self._end, count)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error
        self._failed = False

    def _reserve(self, descriptor: int, begin: int, count: int) -> bool:
        """Have the file system keep so many bytes for a file; False: it cannot do so. Raises OSError where it has no room."""
        try:
            if self._disk.reserve is not None:
                self._disk.reserve(descriptor, begin, count)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return False
        return self._disk.reserve is not None

    def _try_out(self, descriptor: int, begin: int, count: int) -> None:
        """Write so many bytes into a file from `begin` on, and sync it. Raises OSError."""
        os.lseek(descriptor, begin, os.SEEK_SET)
        piece = memoryview(os.urandom(min(count, _PIECE_BYTES)))  # zeros take no room where a file system compresses
        for offset in range(0, count, _PIECE_BYTES):
            rest = piece[: count - offset]
            while rest:
                rest = rest[self._disk.write(descriptor, rest) :]
        self._disk.fsync(descriptor)

    def take_back(self) -> None:
        """Cut off the last commit, which was held only (rule 7); the next one leads to the same outer step."""
        if self._before_last is None:
            raise LocalProtocolError(f"journal: nothing is held after outer step {self._outer_step}")
        self._give_up_round()
        del self.rounds[self._outer_step]
        self._outer_step -= 1
        self._durable = self._committed = self._before_last
        self._before_last = None
        self._cut_back(self._committed)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, base_outer_step: int) -> None:
        self._append({"kind": "segment", "format": FORMAT, "base_outer_step": base_outer_step})
        self._make_durable()
        try:
            sync(self.path.parent, self._disk.fsync)
        except OSError as error:
            raise StorageError(f"{self.path.parent}: cannot be written ({error.strerror})") from error

    def _check_step(self, outer_step: int) -> None:
        if outer_step != self._outer_step + 1:
            raise LocalProtocolError(f"journal: outer step {outer_step} after {self._outer_step}")

    def _append(self, header: Mapping[str, object], *body: Buffer) -> None:
        self._mend()
        self._write(frame(header, *body))
        self._end = os.fstat(self._descriptor).st_size

    def _write(self, parts: Iterable[Buffer]) -> None:
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest:
                    rest = rest[self._disk.write(self._descriptor, rest) :]
        except Exception as error:
            self._failed = True
            self._cut_back(self._end)
            if isinstance(error, OSError):
                raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error
            raise

    def _make_durable(self) -> None:
        try:
            self._disk.fsync(self._descriptor)
        except Exception as error:
            self._failed = True
            self._committed = self._durable  # after a failed fsync nothing since the last one can be trusted
            if self._outer_step in self.rounds:  # its digest goes
                begins, ends = self.rounds[self._outer_step]
                self.rounds[self._outer_step] = begins, min(ends, self._durable)
            self._give_up_round()
            if isinstance(error, OSError):
                raise StorageError(f"{self.path}: cannot be synced ({error.strerror})") from error
            raise
        self._committed = self._durable = self._end
        self._failed = False

    def _give_up_round(self) -> None:
        self._fragments.clear()
        self._round_id = 0
        if self._end != self._committed:
            self._cut_back(self._committed)

    def _cut_back(self, end: int) -> None:
        self._end, self._torn = end, True
        try:
            os.ftruncate(self._descriptor, end)
        except OSError:
            return  # `_mend` tries again before the next append
        self._torn = False

    def _mend(self) -> None:
        self._check_in_place()
        if self._torn:
            self._cut_back(self._end)
        if self._torn:
            raise StorageError(f"{self.path}: bytes behind {self._end} cannot be cut off")

    def _check_in_place(self) -> None:
        """Raise StorageError where `path` does not name the open file any more: a restart would not find what is written."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                return
        except OSError as error:
            raise StorageError(f"{self.path}: is gone ({error.strerror}); put its folder back, or end this process") from error
        raise StorageError(f"{self.path}: is another file than before; put its folder back, or end this process")


def replay(path: Path, base_outer_step: int) -> Iterator[CommittedRound]:
    """Yield the committed rounds of a segment in order; pass over a tail without commit; change nothing.

    Raises StorageError for damage, with file and offset, and for a segment of another base; FormatError.
    """
    survey = _survey(path, base_outer_step)  # damage is found before anything is applied
    if not survey.end:
        return
    try:
        yield from _rounds(path, (0, survey.end), "" if survey.format == FORMAT else "fp32")
    except BadRecord as bad:
        raise StorageError(f"{path}: was changed at byte {bad.offset} while it was read ({bad}); read it again") from None


def rounds_in(path: Path, base_outer_step: int) -> Mapping[int, Span]:
    """Return where each committed round of a segment is, by the outer step that it leads to; none of an older format.

    Reads all of it. Raises as `replay`.
    """
    survey = _survey(path, base_outer_step)
    return survey.rounds if survey.format == FORMAT else {}


def read_round(path: Path, span: Span, outer_step: int) -> CommittedRound:
    """Return the round to this outer step; nothing else of the segment is read. Raises StorageError for damage."""
    try:
        found = next(_rounds(path, span, ""), None)
    except BadRecord as bad:
        raise StorageError(f"{path}: damaged at byte {bad.offset} ({bad})") from None
    if found is None or found.outer_step != outer_step:
        raise StorageError(f"{path}: the round to outer step {outer_step} does not begin at byte {span[0]}")
    return found


def _rounds(path: Path, span: Span, residual_form: str) -> Iterator[CommittedRound]:
    pending: dict[int, tuple[MergeRecord, Tensor | None]] = {}
    round_id, replaces = 0, False
    committed: CommittedRound | None = None  # its digest may follow
    for record in records(path, span[0]):
        header = record.header
        if committed is not None:
            yield committed if header["kind"] != "digest" else replace(committed, digest=str(header["digest"]))
            committed = None
        if header["kind"] == "fragment":
            pending, round_id = (pending if header["round_id"] == round_id else {}), header["round_id"]
            fragment, injected = fragment_of(path, record)
            pending[fragment.fragment_id] = fragment, injected
            replaces = header["replaces"]
        elif header["kind"] == "commit":
            fragments = [pending[fragment_id] for fragment_id in sorted(pending)]
            committed = replace(_committed(path, record, fragments, replaces), residual_form=residual_form)
            pending = {}
        if record.end >= span[1]:
            break
    if committed is not None:
        yield committed


def _committed(
    path: Path, record: Record, fragments: Sequence[tuple[MergeRecord, Tensor | None]], replaces: bool
) -> CommittedRound:
    header = record.header
    try:
        brings = Injected.from_json(header["injected"])
        injected = {fragment.fragment_id: vector for fragment, vector in fragments if vector is not None}
        injection = Injection(brings=brings, base=None, replaces=replaces, fragments=injected) if brings is not None else None
        trust = header.get("trust")
        return CommittedRound(
            round_id=header["round_id"],
            outer_step=header["outer_step"],
            reason=header["reason"],
            fragments=tuple(fragment for fragment, _ in fragments),
            tokens=header["tokens"],
            base=str(header.get("base", "")),
            digest=str(header.get("digest", "")),
            injection=injection,
            update=header.get("update"),
            audit=str(header.get("audit", "")),
            draft=str(header.get("audit_draft", "")),
            trust=None if trust is None else {peer_id: Trust.from_json(written) for peer_id, written in trust.items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path}: the record at byte {record.offset} is not a commit ({error!r})") from error


def replay_segments(segments: Iterable[tuple[int, Path]], outer_step: int, at_least: int = 0) -> Iterator[CommittedRound]:
    """Yield the committed rounds after the checkpoint of `outer_step`, across segments (base, path) in order.

    at_least: an outer step that is known to be committed. Raises as `replay`, and StorageError when steps are missing between
    segments.
    """
    for base, path in segments:
        if base != outer_step:
            raise StorageError(f"{path}: begins after outer step {base}, but what comes before ends at {outer_step}")
        for committed in replay(path, base):
            outer_step = committed.outer_step
            yield committed
    if outer_step < at_least:
        raise StorageError(
            f"the journal ends at outer step {outer_step}, but step {at_least} was committed; a segment is missing"
        )


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a segment holds."""

    end: int  # of the last commit, or of the first record when there is none
    outer_step: int  # after the last commit
    cut: Cut | None  # what lies behind it
    format: int
    before_last: int | None  # where the round of the last commit begins, if no digest follows it
    rounds: Mapping[int, Span]  # by the outer step that each leads to


def _survey(path: Path, base_outer_step: int) -> _Survey:
    """Read a whole segment, to which another process may append meanwhile. Raises StorageError for damage, FormatError."""
    end, outer_step, round_id, fragments, version = 0, base_outer_step, 0, set[int](), FORMAT
    before_last, rounds = None, dict[int, Span]()
    reason = "the last round was not committed"
    try:
        size = path.stat().st_size  # what is appended from here on says nothing of a record that was not whole yet
        for record in records(path):
            header = record.header
            if record.offset == 0:
                version = _check_base(path, header, base_outer_step)
                end = record.end
            elif header["kind"] == "fragment":
                fragments = (fragments if header["round_id"] == round_id else set()) | {header["fragment_id"]}
                round_id = header["round_id"]
            elif header["kind"] == "commit":
                _check_commit(path, record, outer_step, round_id, fragments)
                before_last, end, outer_step, fragments = end, record.end, header["outer_step"], set()
                rounds[outer_step] = before_last, end
            elif header["kind"] == "digest":
                if header["outer_step"] != outer_step or record.offset != end:
                    raise StorageError(f"{path}: damaged at byte {record.offset} (a digest that follows no commit of its step)")
                end, before_last = record.end, None
                if outer_step in rounds:
                    rounds[outer_step] = rounds[outer_step][0], end
    except BadRecord as bad:
        if good_record_after(path, bad.offset, size):
            raise StorageError(f"{path}: damaged at byte {bad.offset} ({bad}); restore it from a copy") from None
        reason = f"torn at byte {bad.offset}: {bad}"
    except (KeyError, TypeError) as error:
        raise StorageError(f"{path}: not a journal ({error!r})") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    return _Survey(end, outer_step, Cut(size - end, reason) if size > end else None, version, before_last, rounds)


def _check_base(path: Path, header: Mapping[str, Any], base_outer_step: int) -> int:
    """Return the segment's format. Raises StorageError, FormatError."""
    if header["kind"] != "segment":
        raise StorageError(f"{path}: not a journal")
    check_format(path, header["format"], FORMAT, OLDER)
    if header["base_outer_step"] != base_outer_step:
        raise StorageError(f"{path}: follows outer step {header['base_outer_step']}, not {base_outer_step}")
    return int(header["format"])


def _check_commit(path: Path, record: Record, outer_step: int, round_id: int, fragments: set[int]) -> None:
    header = record.header
    if header["outer_step"] != outer_step + 1 or header["round_id"] != round_id or header["fragments"] != sorted(fragments):
        raise StorageError(f"{path}: damaged at byte {record.offset} (a commit that does not fit what is before it)")
