"""The operator's standing orders, which outlast the process: the run is paused, or it is to end with the open round.

Owns: orders.json of the coordinator's folder. Must not know: rounds, and what an order means to them.
"""

from __future__ import annotations

from pathlib import Path

from edit.durable_files import read_json, write_json
from edit.errors import StorageError

__all__ = ["OperatorFlags"]

FORMAT = 1


class OperatorFlags:
    """`paused` and `draining` are as they were last written. Raises StorageError when the file is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            kept = read_json(path, version=FORMAT) if path.exists() else {"paused": False, "draining": False}
            self.paused, self.draining = bool(kept["paused"]), bool(kept["draining"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: is damaged ({error!r}); remove it, and pause or drain the run again") from error

    def pause(self) -> None:
        """No rounds until `resume`. On disk when this returns. Raises StorageError: the order is not given."""
        self._write(paused=True, draining=self.draining)

    def drain(self) -> None:
        """The run ends with the open round, and stays so until `resume`. Raises StorageError, as all of them."""
        self._write(paused=self.paused, draining=True)

    def resume(self) -> None:
        """Both are over."""
        self._write(paused=False, draining=False)

    def _write(self, *, paused: bool, draining: bool) -> None:
        if (paused, draining) != (self.paused, self.draining):
            write_json(self._path, {"paused": paused, "draining": draining}, version=FORMAT)
            self.paused, self.draining = paused, draining
