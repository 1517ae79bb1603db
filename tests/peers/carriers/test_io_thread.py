"""The bridge: results, errors, interruption and a clean end. Every wait has a timeout; nothing sleeps."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from edit.errors import LocalProtocolError, TransportError
from peers.carriers.io_thread import Interrupted, IoThread


async def answer(value: int) -> int:
    return value


async def never() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("broken")


def test_call_returns_results_and_raises_errors() -> None:
    with IoThread() as bridge:
        assert bridge.call(answer(7), timeout=5) == 7
        with pytest.raises(ValueError, match="broken"):
            bridge.call(fail(), timeout=5)
        with pytest.raises(TransportError, match=r"0\.01 s"):
            bridge.call(never(), timeout=0.01)


def test_the_loop_runs_on_one_other_thread() -> None:
    async def where() -> int:
        return threading.get_ident()

    with IoThread() as bridge:
        first, second = bridge.call(where()), bridge.call(where())
    assert first == second != threading.get_ident()


def test_wait_sees_changes_made_on_the_loop() -> None:
    seen: list[int] = []
    with IoThread() as bridge:
        bridge.post(lambda: bridge.change(lambda: seen.append(3)))
        assert bridge.wait(lambda: seen[0] if seen else None, timeout=5) == 3
        assert bridge.read(lambda: len(seen)) == 1


def test_wait_gives_up_at_its_timeout() -> None:
    with IoThread() as bridge:
        assert bridge.wait(lambda: None, timeout=0.01) is None


def test_a_failed_task_ends_every_wait() -> None:
    with IoThread() as bridge:
        bridge.spawn(fail())
        with pytest.raises(ValueError, match="broken"):
            bridge.wait(lambda: None, timeout=5)
        with pytest.raises(ValueError, match="broken"):
            bridge.call(answer(1), timeout=5)


def test_interrupt_ends_waits_until_resumed() -> None:
    with IoThread() as bridge:
        bridge.post(bridge.interrupt)
        with pytest.raises(Interrupted):
            bridge.wait(lambda: None, timeout=5)
        with pytest.raises(Interrupted):
            bridge.call(never(), timeout=5)
        bridge.resume()
        assert bridge.call(answer(2), timeout=5) == 2


@pytest.mark.parametrize("how", ["wait", "call"])
def test_a_signal_ends_a_wait_within_a_second(how: str) -> None:
    with IoThread() as bridge:
        before = signal.signal(signal.SIGUSR1, lambda *_: bridge.interrupt())
        try:
            bridge.post(lambda: signal.raise_signal(signal.SIGUSR1))
            start = time.monotonic()
            with pytest.raises(Interrupted):
                if how == "wait":
                    bridge.wait(lambda: None, timeout=10)
                else:
                    bridge.call(never(), timeout=10)
            assert time.monotonic() - start < 1.0
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_raising_signal_handler_ends_a_wait() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with IoThread() as bridge:
        before = signal.signal(signal.SIGUSR1, stop)
        try:
            with pytest.raises(KeyboardInterrupt):
                bridge.post(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
                bridge.wait(lambda: None, timeout=10)
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
    with IoThread() as bridge:
        bridge.spawn(linger())
        assert started.wait(5)
    assert cancelled.is_set()
    assert threading.active_count() == before


def test_a_closed_bridge_refuses_calls() -> None:
    bridge = IoThread()
    with bridge:
        pass
    bridge.post(lambda: pytest.fail("ran after the end"))
    with pytest.raises(LocalProtocolError):
        bridge.wait(lambda: None, timeout=1)
