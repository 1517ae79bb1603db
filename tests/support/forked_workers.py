"""Workers of pytest-xdist that begin with their imports done: forked from the process that hands out the tests, which has
imported all tests once, compiled them where that was still to do, and runs none itself.

What a worker imports is most of what collecting costs it. A worker that takes the place of one that crashed is started as
usual, and imports all that itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.support import fork_server

IMPORTED = (
    "numba",
    "torch._dynamo",  # the first call of an optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "typer._adapters",  # what reading a command line imports
)
"""What many tests come to import besides, only when they run."""


class Worker(Popen2IO):
    """What execnet holds of a worker: its process, and the files that it reads and writes."""

    def __init__(self, pid: int, stdin: int, stdout: int, execmodel: Any) -> None:
        super().__init__(os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), execmodel)
        self._pid = pid

    def wait(self) -> int | None:
        with contextlib.suppress(OSError):
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)


def fork_workers(config: pytest.Config, count: int) -> None:
    """Import all tests; the next `count` workers that execnet starts are forked here and now, while there is one thread."""
    connections = fork_server.servers(count)  # they import what they do meanwhile
    gc.disable()
    _import(config.rootpath, config.args)
    with contextlib.suppress(ImportError):
        fork_server.compile_kernels()  # the servers have, most likely
    gc.freeze()  # what is imported stays
    gc.enable()
    ready: list[tuple[int, int, int]] = []
    for connection in connections:
        (reads, stdin), (stdout, writes) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            for descriptor in (stdin, stdout, *(each for worker in ready for each in worker[1:])):
                os.close(descriptor)
            for other in set(connections) - {connection}:
                other.close()
            fork_server.use(connection)
            _work(config, reads, writes)
        os.close(reads)
        os.close(writes)
        ready.append((pid, stdin, stdout))
    for connection in connections:
        connection.close()
    start = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        return Worker(*ready.pop(0), execmodel) if ready else start(spec, execmodel)

    gateway_io.create_io = create_io


def _import(root: Path, folders: Sequence[str]) -> None:
    """Import the tests in these folders as pytest does while it collects. What fails here fails again there, and is told."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("test_*.py"))]
    tests = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in (*IMPORTED, *tests):
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(name)


def _work(config: pytest.Config, reads: int, writes: int) -> None:
    """Do what the interpreter does that execnet starts: run the first line that it is sent. Never returns."""
    with fork_server.interpreter():
        config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
        os.dup2(reads, 0)
        os.dup2(writes, 1)
        os.close(reads)
        os.close(writes)
        sys.argv[:] = ["-c"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))  # noqa: S307
