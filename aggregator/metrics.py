"""metrics.jsonl as a subscriber of the run's feed: one JSON object per line.

A full file becomes metrics.jsonl.1, the one before it metrics.jsonl.2, and so on; the oldest is removed. So the disk space that
all of them take is bounded, whatever members do. Lines are never cut: a file holds whole ones.

The file thread writes the lines in order. A disk that refuses a line, or is so slow that too many wait, never stops the run:
the first trouble of each kind is logged, and later lines are tried again. A SIGKILL may lose the last lines; the outer state is
elsewhere (`aggregator.storage`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from aggregator.run_feed import MemberChanged, PeerReported, RoundReport, RunEnded, RunEvent
from edit.durable_files import append_whole
from edit.plain_text import json_text

__all__ = ["KEPT", "MetricsLog", "file_names"]

_log = logging.getLogger(__name__)
_MOST_WAITING = 1000
_FILE_BYTES = 64 << 20
KEPT = 4  # files, the one that is written included


def file_names(path: Path) -> list[Path]:
    """Return where the lines of `path` are looked for, newest first."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT))]


class MetricsLog:
    """Appends lines to `path`.

    Args:
        files: the file thread; what was given to it is written when it is shut down.
        most_waiting: lines that wait to be written; more are lost.
        file_bytes: a file that would become larger than that is full.
    """

    def __init__(
        self, path: Path, files: Executor, most_waiting: int = _MOST_WAITING, *, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._path, self._files, self._file_bytes = path, files, file_bytes
        self._room = threading.Semaphore(most_waiting)
        self._refused = self._overrun = False  # said already

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Write the line of an event that has one: a closed round, a member's change, a peer's report, the end of the run."""
        match event:
            case RoundReport():
                self.line("round", unix, event.as_json())
            case MemberChanged(peer_id, state, reason):
                self.line("member", unix, {"peer_id": peer_id, "state": state, "reason": reason})
            case PeerReported(peer_id, heartbeat, phase):
                doing = phase.value if phase is not None else ""
                self.line("peer", unix, {"peer_id": peer_id, **heartbeat.as_json(), "phase": doing})
            case RunEnded(outer_step, tokens):
                self.line("end", unix, {"outer_step": outer_step, "tokens": tokens})

    def line(self, kind: str, unix: float, fields: Mapping[str, object]) -> None:
        """Append one line, soon; `unix`: seconds since 1970."""
        text = json_text({"kind": kind, "t": round(unix, 3), **fields}) + "\n"
        if self._room.acquire(blocking=False):
            self._files.submit(self._append, text)
        elif not self._overrun:
            self._overrun = True
            _log.warning("metrics: %s is written too slowly; lines are lost, the run goes on", self._path)

    def _append(self, text: str) -> None:
        """In the file thread."""
        line = text.encode()
        try:
            with contextlib.suppress(FileNotFoundError):
                if 0 < self._path.stat().st_size > self._file_bytes - len(line):
                    self._begin_file()
            with self._path.open("ab", buffering=0) as file:
                append_whole(file.fileno(), line)
        except OSError as error:
            if not self._refused:
                self._refused = True
                _log.warning("metrics: %s cannot be written (%s); the run goes on without", self._path, error.strerror)
        finally:
            self._room.release()

    def _begin_file(self) -> None:
        """Move each file to the next older name; the oldest is overwritten."""
        names = file_names(self._path)
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
