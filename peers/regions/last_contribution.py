"""What a region contributed last, on disk, so that what its run did after it can be told from it after a kill.

Owns: the file, written whole or not at all, and whether it can be trusted. Must not know: what is done with it.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from edit.errors import StorageError
from edit.fragments.digest import digest
from edit.regional_peer import Sent

__all__ = ["SentFile"]

_log = logging.getLogger("peers")


class SentFile:
    """`edit.regional_peer.Memory` in the file `path`, for the run above `run_id`."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id

    def sent(self) -> Sent | None:
        """What was kept last; None, with a line in the log, for a file that is damaged."""
        if not self._path.exists():
            return None
        try:
            return self._read()
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            _log.warning("%s: is damaged and passed over (%s)", self._path, error)
            return None

    def keep(self, sent: Sent) -> None:
        """Durable when this returns. Raises StorageError."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        place = [self._run_id, sent.upper_step, sent.lower_step, digest(sent.parameters)]
        try:
            save_file({f"{i}": part for i, part in enumerate(sent.parameters)}, temporary, {"sent": json.dumps(place)})
            _sync(temporary)
            temporary.replace(self._path)
            _sync(self._path.parent)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{self._path}: cannot be written ({error})") from error

    def _read(self) -> Sent | None:
        with safe_open(self._path, framework="pt") as file:
            run_id, upper_step, lower_step, claimed = json.loads(file.metadata()["sent"])
            parameters = tuple(file.get_tensor(f"{i}") for i in range(len(file.keys())))
        if digest(parameters) != claimed:
            raise ValueError("wrong digest")
        return Sent(int(upper_step), int(lower_step), parameters) if run_id == self._run_id else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
