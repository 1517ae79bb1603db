"""Fixtures of the algorithm library's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.scripted_peer import Peer, entered_peer


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Makes entered peers; leaves them as after an exception, so that no outcome is waited for."""
    peers: list[Peer] = []

    def make(**settings: Any) -> Peer:
        peers.append(entered_peer(**settings))
        return peers[-1]

    yield make
    for made in peers:
        made.worker.__exit__(KeyboardInterrupt, None, None)
