"""The peer's metrics file: JSON lines, each written at once, so that a killed peer loses none.

A disk that refuses a line never stops the training, and no half line stays: the first one is logged, and later lines are tried
again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from edit.durable_files import append_whole
from edit.errors import ConfigError
from edit.plain_text import json_text

__all__ = ["EVERY", "Metrics"]

_log = logging.getLogger(__name__)
EVERY = 10  # inner steps between two lines


class Metrics:
    """Context manager over the file, to which lines are appended. path: None writes nothing. clock: unix seconds.

    kind      keys                                             written
    --------  -----------------------------------------------  ------------------------------------------------------------
    step      t, step, loss, tokens_per_s, outer_step          every tenth inner step; a loss that is not finite is null
    outer     t, outer_step, digest, reason, aggregator        when the outer parameters or the reason of this aggregator's
                                                               fragments changed
    snapshot  t, outer_step, digest, sources                   for each snapshot; sources: the members that sent it;
                                                               empty when this peer had all of it
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: BinaryIO | None = None
        self._refused = False  # said already

    def __enter__(self) -> Metrics:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            except OSError as error:
                raise ConfigError(f"--metrics {self._path}: cannot be written ({error.strerror})") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a network's disk may refuse here what it took before
                self._file.close()

    def step(self, step: int, loss: float, tokens_per_s: float, outer_step: int) -> None:
        """Write that an inner step was taken, if it is a tenth one."""
        if step % EVERY == 0:
            self._write("step", {"step": step, "loss": loss, "tokens_per_s": round(tokens_per_s, 1), "outer_step": outer_step})

    def outer(self, outer_step: int, digest: str, reason: str, aggregator: int = 0) -> None:
        """Write that the outer parameters of this aggregator's fragments changed, or that a round was lost."""
        values = {"outer_step": outer_step, "digest": digest, "reason": reason, "aggregator": aggregator}
        self._write("outer", values)

    def snapshot(self, outer_step: int, digest: str, sources: Sequence[str]) -> None:
        """Write that a snapshot was read."""
        self._write("snapshot", {"outer_step": outer_step, "digest": digest, "sources": list(sources)})

    def _write(self, kind: str, values: dict[str, object]) -> None:
        if self._file is None:
            return
        line = json_text({"kind": kind, "t": round(self._clock(), 3), **values}) + "\n"
        try:
            append_whole(self._file.fileno(), line.encode())
        except OSError as error:
            if not self._refused:
                self._refused = True
                _log.warning("--metrics %s: cannot be written (%s); the run goes on without", self._path, error.strerror)
