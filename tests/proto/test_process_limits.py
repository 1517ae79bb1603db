"""A process with too few files or threads says so, before gRPC's C core ends it by a signal."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from edit.errors import ConfigError
from editpb.process_limits import LEAST_FILES, LEAST_THREADS, check_limits


def test_a_process_with_enough_of_both_has_the_threads_that_it_had() -> None:
    before = set(threading.enumerate())
    check_limits()
    assert not {each.name for each in set(threading.enumerate()) - before} & {"limit"}


def test_a_process_that_may_open_few_files_says_so() -> None:
    program = f"""
import resource
from editpb.process_limits import check_limits
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({LEAST_FILES}, most))
check_limits()
resource.setrlimit(resource.RLIMIT_NOFILE, ({LEAST_FILES - 1}, most))
check_limits()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    *_, last = done.stderr.splitlines()
    why = f"this process may open {LEAST_FILES - 1} files, and needs {LEAST_FILES} at least; raise its limit (ulimit -n)"
    assert last == f"edit.errors.ConfigError: {why}"


def test_a_process_that_the_system_refuses_threads_says_so_and_ends_those_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start = list[threading.Thread](), threading.Thread.start

    def some(self: threading.Thread) -> None:
        if len(begun) == LEAST_THREADS - 1:
            raise RuntimeError("can't start new thread")
        begun.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(ConfigError, match=f"begin {LEAST_THREADS - 1} more threads, and it needs {LEAST_THREADS} at least"):
        check_limits()
    assert not any(each.is_alive() for each in begun)
