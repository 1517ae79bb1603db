"""The contributions behind the last outer steps, as they were sent, so that anybody who has them can merge them once more, and
scorers can read them.

    FOLDER/step-00000012/fragment-00003   what was merged of fragment 3 in the commit to outer step 12
    FOLDER/pending/...                    the same of the open round

A file has one record (`aggregator.storage.journal_records`) for each shard: the header as its peer signed it, the inner steps
and tokens that counted for it, and its bytes. A round's files get their place just before its commit is written, and the oldest
files go after it: no commit loses its files to a SIGKILL or a full disk. The next start or commit removes files of a step that
was not committed, and of steps that are too old. In a swarm files may also wait for what others take as the outer step
(`UndecidedError`, `decided`). They are not brought to the disk (fsync): after a power cut the last ones may be missing or
damaged, which `load_kept` says.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from aggregator.storage.journal_records import BadRecord, Buffer, frame, outlines, records
from edit.durable_files import names_in
from edit.errors import EditError, GoneError, RefusedError, StorageError
from edit.fragments.schema import Schema
from edit.rounds.work_claims import Work
from editpb import data_pb2
from editpb.data_messages import contribution_header_from_pb, contribution_header_to_pb
from editpb.messages import ContributionHeader

__all__ = [
    "KEPT_FOR_SCORERS",
    "Kept",
    "KeptContributions",
    "KeptShard",
    "UndecidedError",
    "kept_files",
    "load_kept",
    "step_folder",
]

KEPT_FOR_SCORERS = 2  # outer steps: the last one, and the one before, which a scorer may be reading
_PENDING = "pending"
_FORMAT = 1


class UndecidedError(RefusedError):
    """A commit is waited for no longer; others may still take the round as the outer step, so its files stay."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One shard of a contribution. work: what counted for the whole contribution to this fragment."""

    header: ContributionHeader
    work: Work
    data: Buffer


@dataclass(frozen=True, slots=True)
class KeptShard:
    """Where a shard lies whose bytes are `header.total_bytes` long."""

    header: ContributionHeader
    path: Path
    begin: int

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes of the shard. Raises GoneError when it is kept no longer, StorageError."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin + start)
                return file.read(end - start)
        except FileNotFoundError as error:
            raise _gone(self.path) from error
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read ({error.strerror})") from error


class KeptContributions:
    """The folder of a run that keeps them. Used in the worker thread, but for the constructor, `shards` and `decided`.

    Args:
        steps: of so many outer steps, the last ones; at least 1.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._round_id = -1

    def add(self, round_id: int, fragment_id: int, shards: Iterable[Kept]) -> None:
        """Keep what is merged of a fragment in the open round. Raises StorageError: the round is not to be committed."""
        pending = self._folder / _PENDING
        try:
            if round_id != self._round_id:
                shutil.rmtree(pending, ignore_errors=True)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                pending.mkdir(mode=0o700)
                self._round_id = round_id
            with (pending / _name(fragment_id)).open("wb") as file:
                for shard in shards:
                    for part in frame(_header_of(shard), shard.data):
                        file.write(part)
        except OSError as error:
            raise _refused(pending, error) from error

    @contextlib.contextmanager
    def committing(self, outer_step: int) -> Iterator[None]:
        """Give the open round's files the place of the outer step that it becomes in the block.

        After the block let go of the oldest steps; where the block raises, of this one, but not for UndecidedError: then
        `decided` does. Raises StorageError before the block: the round is not to be committed.
        """
        place = step_folder(self._folder, outer_step)
        try:
            shutil.rmtree(place, ignore_errors=True)
            (self._folder / _PENDING).rename(place)
            self._round_id = -1
        except OSError as error:
            raise _refused(place, error) from error
        try:
            yield
        except UndecidedError:
            raise
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self.committed(outer_step)

    def committed(self, outer_step: int) -> None:
        """Let go of what is older than the last outer steps, and of what did not become one. outer_step: the last one."""
        with contextlib.suppress(StorageError):  # what cannot be removed now is removed after the next one
            for step, path in _kept(self._folder):
                if step <= outer_step - self._steps or step > outer_step:
                    shutil.rmtree(path, ignore_errors=True)

    def decided(self, outer_step: int, round_id: int, schema: Schema) -> None:
        """Let go of what is kept of this outer step if it is of another round than became it. Damaged files stay."""
        with contextlib.suppress(GoneError, StorageError):
            if any(one.header.round_id != round_id for one in self.shards(outer_step, schema)):
                shutil.rmtree(step_folder(self._folder, outer_step), ignore_errors=True)

    def shards(self, outer_step: int, schema: Schema) -> list[KeptShard]:
        """Return what was merged in the commit to this outer step, without its bytes.

        Raises GoneError when it is not kept, StorageError for what is damaged.
        """
        place = step_folder(self._folder, outer_step)
        try:
            return [shard for path in sorted(place.iterdir()) for shard in _shards(path, schema)]
        except FileNotFoundError as error:
            raise _gone(place) from error
        except OSError as error:
            raise StorageError(f"{place}: cannot be read ({error.strerror})") from error


def step_folder(folder: Path, outer_step: int) -> Path:
    """Return where the contributions to this outer step lie."""
    return folder / f"step-{outer_step:08d}"


def load_kept(folder: Path, outer_step: int, schema: Schema) -> list[Kept]:
    """Return what was merged in the commit to this outer step. Raises StorageError for what is not there or damaged."""
    return [shard for path in kept_files(folder, outer_step) for shard in _read(path, schema)]


def kept_files(folder: Path, outer_step: int) -> list[Path]:
    """Return the files of the commit to this outer step. Raises StorageError where it is not kept."""
    place = step_folder(folder, outer_step)
    if not place.is_dir():
        steps = _in_words([step for step, _ in _kept(folder)])
        others = f"; here are those to {steps}" if steps else ", nor any others"
        raise StorageError(f"{folder}: the contributions to outer step {outer_step} are not kept{others}")
    return sorted(place.iterdir())


def _read(path: Path, schema: Schema) -> Iterator[Kept]:
    with _damage(path):
        for record in records(path):
            values = record.header
            header = _header_in(path, values, schema)
            yield Kept(header, Work(int(values["inner_steps"]), int(values["tokens"])), record.body)


def _shards(path: Path, schema: Schema) -> Iterator[KeptShard]:
    with _damage(path):
        for values, begin, end in outlines(path):
            header = _header_in(path, values, schema)
            if header.total_bytes != end - begin:
                raise BadRecord(begin, "the shard has another size than its header says")
            yield KeptShard(header, path, begin)


def _header_in(path: Path, values: Mapping[str, Any], schema: Schema) -> ContributionHeader:
    if values["format"] != _FORMAT:
        raise StorageError(f"{path}: is of format {values['format']}; this software reads {_FORMAT}")
    message = data_pb2.ContributionHeader.FromString(base64.b64decode(values["header"], validate=True))
    return contribution_header_from_pb(message, schema)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Raise StorageError for what is not as it was written."""
    try:
        yield
    except (BadRecord, DecodeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path}: is damaged ({error})") from error
    except StorageError:
        raise
    except EditError as error:
        raise StorageError(f"{path}: is damaged ({error})") from error


def _header_of(shard: Kept) -> dict[str, object]:
    return {
        "kind": "contribution",
        "format": _FORMAT,
        "header": base64.b64encode(contribution_header_to_pb(shard.header).SerializeToString()).decode(),
        "inner_steps": shard.work.inner_steps,
        "tokens": shard.work.tokens,
    }


def _name(fragment_id: int) -> str:
    return f"fragment-{fragment_id:05d}"


def _kept(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for name in names_in(folder, "step-*"):
        with contextlib.suppress(ValueError):
            found.append((int(name.removeprefix("step-")), folder / name))
    return sorted(found)


def _in_words(steps: Sequence[int]) -> str:
    """Return outer steps, ascending, as `1 to 3, 7`."""
    runs = list[list[int]]()
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _gone(path: Path) -> GoneError:
    return GoneError(f"contributions are kept of the last outer steps only, and {path.name} is not there any more")


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: contributions cannot be kept ({error.strerror})")
