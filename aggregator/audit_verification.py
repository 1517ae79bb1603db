"""Verify an audit log that lies in a file: the entries in order here, the signatures of contributions in processes beside it.

The signatures take nearly all of the time: 12 ms for a commit of 16 peers with 12 fragments, 1 ms for the rest of it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import TracebackType

from cryptography.x509 import Certificate

from edit.trust.canonical import MOST_LINE_BYTES
from edit.trust.checkpoints import NoteKey
from editpb.audit_log import LogFault, LogVerifier, Signed, verify_signatures

__all__ = ["entries_of", "verified_log"]

_BATCH_BYTES = 1 << 20  # of lines that a process is given at once: about 0.2 s of work
_AHEAD = 2  # batches for each process that wait


def entries_of(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a log; one that is being written is passed over. Raises LogFault for one that is too long."""
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES + 2):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) > MOST_LINE_BYTES:
                raise LogFault(f"{path}: an entry has more than {MOST_LINE_BYTES} bytes")


def verified_log(
    lines: Iterable[bytes],
    key: NoteKey | None = None,
    *,
    sample: int | None = None,
    processes: int | None = None,
    authorities: Collection[Certificate] = (),
) -> LogVerifier:
    """Return the verifier after all entries. Raises LogFault.

    Args:
        key: of the log; None: what the log itself says.
        sample: verify the signatures of so many commits, drawn at random; None: of all.
        processes: that verify signatures; None: one for each core that this process may use.
        authorities: as for `LogVerifier`.
    """
    log = LogVerifier(key, signatures=False, authorities=authorities)
    if sample is not None:
        drawn = _drawn(log, lines, sample)
        log.verified = sum(verify_signatures(signed, [(index, line)]) for signed, index, line in drawn)
        return log
    with _Pool(processes or len(os.sched_getaffinity(0))) as pool:
        for line in lines:
            if (entry := log.take(line))["kind"] == "commit":
                pool.add(log.signed, entry["index"], line)
        log.verified = pool.finish()
    return log


def _drawn(log: LogVerifier, lines: Iterable[bytes], sample: int) -> list[tuple[Signed, int, bytes]]:
    """Take all entries; return so many commits, each as likely as any other (Vitter's algorithm R)."""
    chance, drawn = random.SystemRandom(), list[tuple[Signed, int, bytes]]()
    for line in lines:
        if (entry := log.take(line))["kind"] != "commit":
            continue
        if len(drawn) < sample:
            drawn.append((log.signed, entry["index"], line))
        elif (place := chance.randrange(log.commits)) < sample:
            drawn[place] = log.signed, entry["index"], line
    return drawn


def _end_with_parent() -> None:
    """End this process of a pool with the one that made it: one that is killed tells it nothing, and it would wait for ever."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Pool:
    """Verifies signatures batch by batch: the first one, if no other follows, in this process."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._batches: dict[Signed, list[tuple[int, bytes]]] = {}
        self._bytes, self._verified = 0, 0
        self._running = deque[Future[int]]()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, signed: Signed, index: int, line: bytes) -> None:
        """Have the signatures of an entry verified. Raises LogFault for this one, or an earlier one."""
        self._batches.setdefault(signed, []).append((index, line))
        self._bytes += len(line)
        if self._bytes >= _BATCH_BYTES:
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._processes, spawn, initializer=_end_with_parent)
            self._submit(self._pool)

    def finish(self) -> int:
        """Wait for all; return how many signatures there were. Raises LogFault."""
        if self._pool is not None:
            self._submit(self._pool)
        while self._running:
            self._verified += self._running.popleft().result()
        for signed, entries in self._batches.items():
            self._verified += verify_signatures(signed, entries)
        return self._verified

    def _submit(self, pool: ProcessPoolExecutor) -> None:
        for signed, entries in self._batches.items():
            self._running.append(pool.submit(verify_signatures, signed, entries))
        self._batches, self._bytes = {}, 0
        while len(self._running) > _AHEAD * self._processes:
            self._verified += self._running.popleft().result()
