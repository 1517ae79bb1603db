"""The I/O thread: results, errors, interruption and a clean end. Every wait has a timeout; nothing sleeps."""

from __future__ import annotations

import asyncio
import copy
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from edit.errors import LocalProtocolError, TransportError
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted


async def answer(value: int) -> int:
    return value


async def where() -> int:
    return threading.get_ident()


async def never() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("broken")


def test_call_returns_results_and_raises_errors() -> None:
    with IoThread() as io:
        assert io.call(answer(7), timeout=5) == 7
        with pytest.raises(ValueError, match="broken"):
            io.call(fail(), timeout=5)
        with pytest.raises(TransportError, match=r"0\.01 s"):
            io.call(never(), timeout=0.01)


def test_the_loop_runs_on_one_other_thread() -> None:
    with IoThread() as io:
        first, second = io.call(where()), io.call(where())
    assert first == second != threading.get_ident()


def test_wait_sees_changes_made_on_the_loop() -> None:
    seen: list[int] = []
    with IoThread() as io:
        io.post(lambda: io.change(lambda: seen.append(3)))
        assert io.wait(lambda: seen[0] if seen else None, timeout=5) == 3
        assert io.read(lambda: len(seen)) == 1


def test_a_change_runs_on_the_loops_thread_whoever_asks_for_it() -> None:
    with IoThread() as io:
        here = io.change(threading.get_ident)
        there = io.call(where())
        assert here == there != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            io.change(lambda: 1 // 0)
        assert io.wait(lambda: 1, timeout=5) == 1, "the lock is free again"


def test_wait_gives_up_at_its_timeout() -> None:
    with IoThread() as io:
        assert io.wait(lambda: None, timeout=0.01) is None


def test_a_failed_task_ends_every_wait() -> None:
    with IoThread() as io:
        io.spawn(fail())
        with pytest.raises(ValueError, match="broken"):
            io.wait(lambda: None, timeout=5)
        with pytest.raises(ValueError, match="broken"):
            io.call(answer(1), timeout=5)


def test_interrupt_ends_waits_until_resumed() -> None:
    with IoThread() as io:
        io.post(io.interrupt)
        with pytest.raises(Interrupted):
            io.wait(lambda: None, timeout=5)
        with pytest.raises(Interrupted):
            io.call(never(), timeout=5)
        io.resume()
        assert io.call(answer(2), timeout=5) == 2


@pytest.mark.parametrize("how", ["wait", "call"])
def test_a_signal_ends_a_wait_that_nothing_else_would_end(how: str) -> None:
    with IoThread() as io:
        before = signal.signal(signal.SIGUSR1, lambda *_: io.interrupt())
        try:
            io.post(lambda: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(Interrupted):
                if how == "wait":
                    io.wait(lambda: None)
                else:
                    io.call(never())
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_raising_signal_handler_ends_a_wait() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with IoThread() as io:
        before = signal.signal(signal.SIGUSR1, stop)
        try:
            with pytest.raises(KeyboardInterrupt):
                io.post(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
                io.wait(lambda: None, timeout=10)
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_closing_cancels_tasks_and_ends_the_thread() -> None:
    cancelled = threading.Event()
    started = threading.Event()

    async def linger() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    before = threading.active_count()
    with IoThread() as io:
        io.spawn(linger())
        assert started.wait(5)
    assert cancelled.is_set()
    assert threading.active_count() == before


def test_an_io_thread_that_has_ended_refuses_calls() -> None:
    io = IoThread()
    with io:
        pass
    io.post(lambda: pytest.fail("ran after the end"))
    with pytest.raises(LocalProtocolError, match="the connection to the run was left: connect again"):
        io.wait(lambda: None, timeout=1)


_FORKED = """
import os, signal, sys, threading, warnings
from edit.errors import ConfigError
from peers.carriers.io_thread import IoThread

warnings.simplefilter("ignore")

async def answer():
    return 7

with IoThread() as io:
    held, free = threading.Event(), threading.Event()
    io.post(lambda: io.read(lambda: (held.set(), free.wait())))
    held.wait()
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # a call that would wait for ever
        calls = {
            "begin": lambda: io.begin(answer()), "call": lambda: io.call(answer()), "spawn": lambda: io.spawn(answer()),
            "change": lambda: io.change(int), "read": lambda: io.read(int), "wait": lambda: io.wait(int),
        }
        for name, call in calls.items():
            try:
                call()
                print(name, "returns")
            except ConfigError as error:
                print(name, error)
        io.post(lambda: print("called"))
        io.__exit__(None, None, None)
        sys.stdout.flush()
        os._exit(0)
    ended = os.waitpid(pid, 0)[1]
    free.set()
    print(ended, io.call(answer()))
"""


def test_in_a_fork_every_call_says_so_and_closing_leaves_the_parents_alone() -> None:
    """At the fork the loop's thread holds the lock, which nobody releases there."""
    ended = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, check=True)
    said = "the connection to the run was made before this process was forked: connect in each rank (start the ranks with "
    said += "torchrun)"
    lines = [f"{name} {said}" for name in ("begin", "call", "spawn", "change", "read", "wait")]
    assert (ended.stdout.splitlines(), ended.stderr) == ([*lines, "0 7"], "")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_it_says_why_it_cannot_be_copied(copied: Callable[[object], object]) -> None:
    with IoThread() as io, pytest.raises(TypeError, match=r"^a connection to a run cannot be copied: connect in each rank"):
        copied(io)


def test_one_that_was_never_entered_says_something_else() -> None:
    with pytest.raises(LocalProtocolError, match="does not run"):
        IoThread().call(answer(1), timeout=5)
