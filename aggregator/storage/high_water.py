"""The last committed outer step, kept beside the journal, so that a journal that lost its end does not pass for a shorter run.

It is written behind each commit, never before: a kill at any moment leaves a mark at or below what the journal holds. A mark
that is a few commits behind is still true, so when commits come faster than the disk writes marks, only the newest is written.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from aggregator.run_feed import RunEvent, StepCommitted
from edit.durable_files import read_json, write_json
from edit.errors import ConfigError, StorageError

__all__ = ["HighWaterMark", "Mark", "read_mark"]

FORMAT = 1  # of high-water.json
_log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """An outer step that was committed, and the digest of theta there."""

    outer_step: int
    digest: str


class HighWaterMark:
    """The mark of one run. A subscriber of its feed.

    Args:
        path: its file.
        writer: one thread; it writes the marks.
        accept_rollback: go on below the mark.
    """

    def __init__(self, path: Path, writer: Executor, *, accept_rollback: bool = False) -> None:
        self._path, self._writer, self._accept = path, writer, accept_rollback
        self._newest: Mark | None = None  # replaced on the event loop, read by the writer
        self._written: Mark | None = None  # the writer's

    def check(self, recovered: Mark | None) -> None:
        """Compare what was recovered with the mark. None: the run has no parameters.

        Raises ConfigError below the mark, and for another digest at the same outer step; StorageError when the mark is damaged.
        With `accept_rollback` it raises neither, and the mark is what was recovered.
        """
        if self._accept:
            if recovered is not None:
                write_json(self._path, recovered._asdict(), version=FORMAT)
            else:
                self._path.unlink(missing_ok=True)
            return
        mark = read_mark(self._path)
        if mark is None:
            return
        if recovered is None or recovered.outer_step < mark.outer_step:
            holds = f"outer step {recovered.outer_step}" if recovered is not None else "no outer step"
            raise ConfigError(
                f"{self._path.parent}: holds {holds}, but outer step {mark.outer_step} was committed; restore the folder outer "
                f"from a newer copy, or go on from there with `serve --accept-rollback`"
            )
        if recovered.outer_step == mark.outer_step and recovered.digest != mark.digest:
            raise ConfigError(
                f"{self._path.parent}: outer step {mark.outer_step} has digest {recovered.digest[:12]}, but was committed with "
                f"{mark.digest[:12]}; restore the folder outer of this run, or go on with `serve --accept-rollback`"
            )

    def on_event(self, event: RunEvent, unix: float) -> None:
        """Write a mark behind each commit."""
        if isinstance(event, StepCommitted):
            self._newest = Mark(event.commit.outer_step, event.commit.digest)
            self._writer.submit(self._write)

    def _write(self) -> None:
        mark = self._newest
        if mark is None or mark is self._written:  # a call before this one wrote it
            return
        self._written = mark
        try:
            write_json(self._path, mark._asdict(), version=FORMAT)
        except StorageError as error:
            _log.warning("%s; the mark before it stays", error)


def read_mark(path: Path) -> Mark | None:
    """Return the mark in a file; None: there is none. Raises StorageError when it is damaged."""
    try:
        values = read_json(path, version=FORMAT)
        return Mark(int(values["outer_step"]), str(values["digest"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: is damaged ({error!r}); `serve --accept-rollback` makes it anew of what the folder outer holds"
        ) from error
