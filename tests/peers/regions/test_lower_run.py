"""The connection of a region to the run below it."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from edit.errors import TransportError
from peers.regions.lower_run import RunBelow


class Channels:
    """Connections that are closed."""

    endpoint = "nowhere:1"

    def rotate(self) -> None: ...
    async def close(self) -> None: ...


class Io:
    """An I/O thread whose calls fail while `broken`, but for the closing of connections."""

    def __init__(self) -> None:
        self.broken = False

    def post(self, callback: object) -> None: ...

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> object:
        coroutine.close()
        if self.broken and coroutine.__name__ != "close":
            raise TransportError("connection refused")
        return SimpleNamespace()


def test_it_says_once_that_the_link_was_broken() -> None:
    io = Io()
    subject = RunBelow(cast(Any, io), cast(Any, Channels()), "below")
    assert subject.look() is not None and not subject.came_back()
    io.broken = True
    assert subject.look() is None and subject.look() is None
    io.broken = False
    assert subject.look() is not None
    assert subject.came_back() and not subject.came_back()
