"""What the operator ordered, so that it outlasts the process: the run is paused, or it is to end with the open round."""

from __future__ import annotations

from pathlib import Path

from edit.durable_files import read_json, write_json
from edit.errors import StorageError

__all__ = ["OperatorFlags"]

FORMAT = 1  # of orders.json


class OperatorFlags:
    """`paused` and `draining`, as they are in the file. Each change is on disk when the call returns.

    Raises StorageError when the file is damaged, or cannot be written: then nothing has changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            kept = read_json(path, version=FORMAT) if path.exists() else {"paused": False, "draining": False}
            self.paused, self.draining = bool(kept["paused"]), bool(kept["draining"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: is damaged ({error!r}); remove it, and pause or drain the run again") from error

    def pause(self) -> None:
        """Open no rounds until `resume`."""
        self._write(paused=True, draining=self.draining)

    def drain(self) -> None:
        """End the run with the open round; it stays ended until `resume`."""
        self._write(paused=self.paused, draining=True)

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self._write(paused=False, draining=False)

    def _write(self, *, paused: bool, draining: bool) -> None:
        if (paused, draining) != (self.paused, self.draining):
            write_json(self._path, {"paused": paused, "draining": draining}, version=FORMAT)
            self.paused, self.draining = paused, draining
