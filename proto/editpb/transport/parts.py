"""Which part of a swarm's model a call is for: it says so in its metadata, so that a host has one port for all its parts. And
who owns the part, which the refusal of a host says that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from edit.errors import GoneError, RemoteProtocolError
from editpb.limits import is_id

__all__ = ["asks_taken", "in_part", "metadata_of", "metadata_of_owner", "owner_in", "part_of"]

_PART = "edit-part"
_TAKEN = "edit-taken"  # of a FetchUpdate: what this host has taken, whoever owns the part
_OWNER = "edit-owner"  # in the trailing metadata
_DIGITS = 4  # there are at most 1024 parts
_Stub = TypeVar("_Stub")


def metadata_of(part: int, *, taken: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call to a part. taken: to a host that need not own it, for an update that it has taken."""
    return ((_PART, str(part)), *(((_TAKEN, "1"),) if taken else ()))


def in_part(stub: _Stub, part: int, *, taken: bool = False) -> _Stub:
    """Return the stub, all of whose calls are for one part from now on. taken: see `metadata_of`."""
    calls: dict[str, Any] = vars(stub)
    for name, call in calls.items():
        calls[name] = partial(call, metadata=metadata_of(part, taken=taken))
    return stub


def asks_taken(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether a call is for an update that the host has taken, whoever owns the part."""
    return any(key == _TAKEN for key, _ in metadata or ())


def part_of(metadata: Iterable[tuple[str, str | bytes]] | None, parts: int) -> int:
    """Return which of the parts a call is for. Raises RemoteProtocolError when it does not say so, GoneError for another."""
    found = [str(value) for key, value in metadata or () if key == _PART]
    if len(found) != 1 or not (found[0].isascii() and found[0].isdigit() and len(found[0]) <= _DIGITS):
        raise RemoteProtocolError(f"the call must name one part in its metadata ({_PART})")
    if (part := int(found[0])) >= parts:
        raise GoneError(f"there is no part {part} here")
    return part


def metadata_of_owner(peer_id: str) -> tuple[tuple[str, str]]:
    """Return the trailing metadata of a call that this peer would serve."""
    return ((_OWNER, peer_id),)


def owner_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return whom a refusal names, or '': an identifier, whose sender may lie."""
    found = [str(value) for key, value in metadata or () if key == _OWNER]
    return found[0] if len(found) == 1 and is_id(found[0]) else ""
