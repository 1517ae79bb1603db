"""Trainings that make a row of results each, in processes of their own, some at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from edit.errors import ConfigError
from edit.lab.bench.results import Row, circumstances
from edit.lab.processes import terminated_as_interrupt

__all__ = ["make_apart"]

_Job = TypeVar("_Job")
_SLICE_S = 0.5  # a signal that comes just before a wait begins does not end it


def make_apart(
    jobs: Sequence[_Job],
    command: Callable[[_Job], tuple[Sequence[str], str]],
    processes: int,
    each: Callable[[_Job, Row | Exception], None],
) -> None:
    """Start a process for every job, so many at a time. What ends this call, also SIGINT and SIGTERM, ends all of them.

    Args:
        command: returns a job's command line, and what the process reads on stdin. It prints a row as JSON.
        each: is called in this thread when a process has ended, with its row and the circumstances before it began, or with
            what went wrong.
    """
    running: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()
    stopped = threading.Event()

    def make(job: _Job) -> dict[str, Any]:
        words, given = command(job)
        pipe = subprocess.PIPE
        with lock:
            if stopped.is_set():
                raise ConfigError("stopped")
            begins = circumstances()
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            running.add(process)
        try:
            out, err = process.communicate(given)
        finally:
            with lock:
                running.discard(process)
        if process.returncode:
            raise ConfigError(err.strip() or f"ended with {process.returncode}")
        return {**begins, **json.loads(out)}

    with terminated_as_interrupt(), ThreadPoolExecutor(processes) as pool:
        try:
            made = {pool.submit(make, job): job for job in jobs}
            pending = set(made)
            while pending:
                ended, pending = wait(pending, timeout=_SLICE_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    error = future.exception()
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    each(made[future], error if error is not None else future.result())
        finally:
            stopped.set()
            with lock:
                left = list(running)  # which the threads take their own out of meanwhile
            for process in left:
                with contextlib.suppress(OSError):
                    process.kill()
