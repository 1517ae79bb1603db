"""The peer daemon: enrolment, session, transports, trainer, data and models; `connect` for a user's own loop."""

import typing

if typing.TYPE_CHECKING:
    from peers.connection import connect

__all__ = ["connect"]


def __getattr__(name: str) -> object:
    """`connect`, whose module needs torch and gRPC, when it is asked for (PEP 562)."""
    if name == "connect":
        from peers.connection import connect

        return connect
    raise AttributeError(f"module 'peers' has no attribute {name!r}")
