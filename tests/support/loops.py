"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

WAIT_S = 30.0
_P = ParamSpec("_P")


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
