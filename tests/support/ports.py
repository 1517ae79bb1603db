"""Ports that no other process is given, although nobody listens on them yet, or between two starts.

A socket that is bound and does not listen keeps a port from whoever asks the system for one, and a listener with SO_REUSEADDR,
as those of gRPC are, may bind beside it.
"""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from aggregator.storage.state_folder import StateFolder


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1, until the block ends."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def hold_port(owner: object) -> int:
    """A port of 127.0.0.1 that is held as long as `owner` lives."""
    holding = held_port()
    weakref.finalize(owner, holding.__exit__, None, None, None)
    return holding.__enter__()


def hold_ports(folder: StateFolder) -> None:
    """Choose the ports of a folder that was never served, and hold them as long as `folder` lives.

    A coordinator keeps its ports over restarts, and between two of them the system could give one to another test.
    """
    server = folder.config().server
    chosen = {name: getattr(server, name) for name in ("listen", "enrol_listen")}
    if folder.addresses.exists() or set(chosen.values()) != {"127.0.0.1:0"}:
        return
    folder.addresses.write_text(json.dumps({name: f"127.0.0.1:{hold_port(folder)}" for name in chosen}))
