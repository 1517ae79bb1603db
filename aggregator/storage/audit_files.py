"""The files that an auditor gets of a run: the audit log, and what merging an outer step once more reads. None has a key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aggregator.storage.checkpoint import replayed_from
from aggregator.storage.cosignatures import note_files
from aggregator.storage.kept_contributions import kept_files
from aggregator.storage.state_folder import AUDIT_COSIGNED, AUDIT_HEAD, AUDIT_KEY, AUDIT_LOG, AUTHORITY, StateFolder
from edit.errors import RefusedError, StorageError

__all__ = ["AuditFile", "audit_files", "replayed_files"]


@dataclass(frozen=True, slots=True)
class AuditFile:
    """A file, as long as it was when it was looked at: what is appended later does not concern its reader."""

    name: str  # below the folder
    size: int
    content: bytes | Path  # what others replace is read at once

    def parts(self, most: int) -> Iterator[bytes]:
        """Yield the content in parts of at most `most` bytes. Raises RefusedError where it is kept no longer, StorageError."""
        if isinstance(self.content, bytes):
            yield from (self.content[at : at + most] for at in range(0, self.size, most))
            return
        left = self.size
        try:
            with self.content.open("rb") as file:
                while left:
                    if not (data := file.read(min(left, most))):
                        raise StorageError(f"{self.name}: has become shorter")
                    left -= len(data)
                    yield data
        except FileNotFoundError as error:
            raise RefusedError(f"{self.name} is kept no longer; fetch a later outer step") from error
        except OSError as error:
            raise StorageError(f"{self.name}: cannot be read ({error.strerror})") from error


def replayed_files(folder: StateFolder, step: int) -> list[Path]:
    """Return the files that a replay of the commit to this outer step reads, beside the log. Raises StorageError."""
    kept = kept_files(folder.contributions, step)
    return [folder.run_json, folder.run_toml, *replayed_from(folder.outer, step - 1), *kept]


def audit_files(folder: StateFolder, step: int, log_key: str) -> list[AuditFile]:
    """Return what an auditor gets. step: the outer step that is merged once more; 0: the log alone. log_key: its public key.

    Heads are read first, then the log: so the log has all that they are signed for. Raises RefusedError where the step is not
    kept, StorageError.
    """
    try:
        kept = replayed_files(folder, step) if step else []
    except StorageError as error:
        raise RefusedError(str(error)) from error
    try:
        read = {AUDIT_HEAD: (folder.path / AUDIT_HEAD).read_bytes(), AUDIT_KEY: log_key.encode() + b"\n"}
        for path in note_files(folder.path / AUDIT_COSIGNED).values():
            with contextlib.suppress(FileNotFoundError):  # newer ones are kept instead
                read[f"{AUDIT_COSIGNED}/{path.name}"] = path.read_bytes()
        for path in (folder.path / AUTHORITY, *kept[:2]):
            read[path.name] = path.read_bytes()
        files = [AuditFile(name, len(data), data) for name, data in read.items()]
        for path in (folder.path / AUDIT_LOG, *kept[2:]):
            files.append(AuditFile(str(path.relative_to(folder.path)), path.stat().st_size, path))
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return files
