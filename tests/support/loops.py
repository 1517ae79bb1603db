"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

WAIT_S = 30.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_a_loop(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run the test on an event loop of its own."""

    @wraps(test)
    def run(*arguments: _P.args, **named: _P.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def until(condition: Callable[[], object]) -> None:
    """Let the loop go on until the condition is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.001)


class _Selector(selectors.DefaultSelector):
    """Waits no longer than until the next alarm, in the time outside of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms: list[tuple[float, asyncio.Future[None]]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.alarms:
            left = max(0.0, min(due for due, _ in self.alarms) - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        ready = super().select(timeout)
        now = time.monotonic()
        for alarm in [alarm for alarm in self.alarms if alarm[0] <= now]:
            self.alarms.remove(alarm)
            if not alarm[1].done():
                alarm[1].set_result(None)
        return ready


class HeldLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until `pass_time`, so that no bound is met by accident. Sockets go on."""

    now = 0.0

    def __init__(self) -> None:
        self.waits = _Selector()
        super().__init__(self.waits)

    def time(self) -> float:
        return self.now


async def outside(seconds: float) -> None:
    """Let the held loop go on for so many seconds of the time outside, in which none pass on it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HeldLoop)
    over: asyncio.Future[None] = loop.create_future()
    loop.waits.alarms.append((time.monotonic() + seconds, over))
    await over


def run_held(main: Coroutine[Any, Any, _T]) -> _T:
    """Run it on a `HeldLoop`, and return what it returns."""
    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        return runner.run(main)


def pass_time(seconds: float) -> None:
    """Let so many seconds pass on the running loop, at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HeldLoop)
    loop.now += seconds
