"""What a region contributed last, on disk: after a kill it tells what the run below has done since.

The file is written whole or not at all, and carries a digest, so that a damaged one is noticed.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from edit.durable_files import check_format, write_atomic_with
from edit.fragments.digest import digest
from edit.plain_text import parse_json
from edit.regional_peer import Sent

__all__ = ["SentFile"]

_log = logging.getLogger("peers")
FORMAT = 1


class SentFile:
    """`edit.regional_peer.Memory` in the file `path`, for the run above `run_id`."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id

    def sent(self) -> Sent | None:
        """Return what was kept last; None, with a line in the log, for a file that is damaged."""
        if not self._path.exists():
            return None
        try:
            return self._read()
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            _log.warning("%s: is damaged and ignored (%s)", self._path, error)
            return None

    def keep(self, sent: Sent) -> None:
        """Keep it; durable when this returns. Raises StorageError."""
        place = json.dumps([self._run_id, sent.upper_step, sent.lower_step, digest(sent.parameters)])
        tensors = {f"{i}": part for i, part in enumerate(sent.parameters)}
        about = {"format": str(FORMAT), "sent": place}
        write_atomic_with(self._path, lambda file: save_file(tensors, file, about), failures=(SafetensorError,))

    def _read(self) -> Sent | None:
        with safe_open(self._path, framework="pt") as file:
            about = file.metadata()
            check_format(self._path, int(about.get("format", "1")), FORMAT)
            run_id, upper_step, lower_step, claimed = parse_json(about["sent"])
            parameters = tuple(file.get_tensor(f"{i}") for i in range(len(file.keys())))
        if digest(parameters) != claimed:
            raise ValueError("wrong digest")
        return Sent(int(upper_step), int(lower_step), parameters) if run_id == self._run_id else None
