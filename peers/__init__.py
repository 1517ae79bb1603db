"""`edit-peer`: the daemon of one peer, and `peers.connect` for a user's own loop.

Owns: how a peer joins a run, reaches it and trains in it. Must not know: the coordinator's code (`aggregator` is never
imported); the two meet in the messages of `editpb`. In reading order:

cli        the commands and their help
daemon     starts and ends the process
carriers/  how a peer reaches the run
training/  the daemon's own training
models/    which model a run means
identity/  the peer's key and certificate
regions/   a site's run as one peer of a run above
swarm/     founding and joining a swarm, and training in it
"""

import typing

import peers.forks  # noqa: F401  (before gRPC)

if typing.TYPE_CHECKING:
    from peers.connection import connect

__all__ = ["connect"]


def __getattr__(name: str) -> object:
    """`connect`, whose module needs torch and gRPC, when it is asked for (PEP 562)."""
    if name == "connect":
        from peers.connection import connect

        return connect
    raise AttributeError(f"module 'peers' has no attribute {name!r}")
