"""What an invitation to a swarm makes of a folder: a member's, or that of an observer, who only looks on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edit.errors import EditError, TransportError
from editpb.identity import Identity
from editpb.invitation import Invitation, SwarmAccess
from peers.identity.enrolment import UntrustedServerError, join
from peers.identity.peer_folder import PeerFolder
from peers.swarm.aggregator_process import ask

__all__ = ["observe", "redeem", "seeds_of"]

_log = logging.getLogger("peers")


def redeem(invitation: str, home: Path, dht_peers: Sequence[str], *, observes: bool = False) -> Invitation:
    """Redeem an invitation; where no member that it names answers, look for some in the DHT. Return it, with their addresses.

    observes: whether it must be for an observer; else it must be for a peer. Raises as `join`.
    """
    invited = Invitation.decode(invitation)
    try:
        join(invitation, home, time.time(), swarm=True, observes=observes)
    except (TransportError, UntrustedServerError) as silence:
        if not dht_peers or invited.swarm is None:
            raise
        _log.info("%s; members are looked for in the DHT", silence)
        found: dict[str, tuple[str, ...]] = {}
        nodes = [f"--dht-peers={maddr}" for maddr in dht_peers]
        try:
            lines = ask("seek-members", home / "seeking", *nodes, told=f"{invitation.strip()}\n")
        except EditError as error:
            if isinstance(silence, TransportError):
                raise
            _log.info("%s", error)
            raise silence from None  # it may be this machine's clock that is wrong
        for line in lines:
            peer_id, _, address = line.partition("=")
            found[peer_id] = (*found.get(peer_id, ()), address)
        _log.info("the DHT knows of %s", ", ".join(found))
        invited = replace(invited, swarm=SwarmAccess(found, invited.swarm.certificate))
        join(invited.encode(), home, time.time(), swarm=True, observes=observes)
    return invited


def seeds_of(invited: Invitation) -> list[tuple[str, str]]:
    """Return (peer_id, HOST:PORT) of the members that an invitation names."""
    hosts = invited.swarm.hosts if invited.swarm is not None else {}
    return [(peer_id, address) for peer_id, addresses in hosts.items() for address in addresses]


def observe(invitation: str, home: Path, dht_peers: Sequence[str] = ()) -> Identity:
    """Make `home` the folder of an observer of a swarm. It can be repeated. Raises as `join`."""
    PeerFolder(home).make_private()
    invited = redeem(invitation, home, dht_peers, observes=True)
    ask("observe", home, *(f"--seed={peer_id}={address}" for peer_id, address in seeds_of(invited)))
    return invited.identity
