"""Which members a reader of a snapshot may also ask. Sans-IO.

A donor is at the committed outer step and has the run's digest: never one below, nor one that differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from aggregator.control.membership import Member
from editpb.limits import MAX_DONORS
from editpb.messages import Donor, SnapshotManifest

__all__ = ["donors_of"]


def donors_of(manifest: SnapshotManifest, members: Iterable[Member], reader: str) -> tuple[Donor, ...]:
    """Return live members other than the reader that serve this very snapshot, at most MAX_DONORS.

    If there are more, different readers get different ones, so that they share the load.
    """
    donors = [
        Donor(member.peer_id, beat.serving)
        for member in members
        if member.live
        and member.peer_id != reader
        and (beat := member.heartbeat) is not None
        and beat.serving is not None
        and (beat.outer_step, beat.digest) == (manifest.outer_step, manifest.digest)
    ]
    return tuple(sorted(donors, key=lambda donor: zlib.crc32(f"{reader} {donor.peer_id}".encode()))[:MAX_DONORS])
