"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
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


class HeldLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until `pass_time`, so that no bound is met by accident. Sockets go on."""

    now = 0.0

    def time(self) -> float:
        return self.now


def run_held(main: Coroutine[Any, Any, _T]) -> _T:
    """Run it on a `HeldLoop`, and return what it returns."""
    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        return runner.run(main)


def pass_time(seconds: float) -> None:
    """Let so many seconds pass on the running loop, at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HeldLoop)
    loop.now += seconds
