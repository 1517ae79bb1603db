"""`edit-peer explain`: what leaves the site of a folder's member, under the run's present configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edit.view.explain import leaving
from edit.view.leaving import Leaving
from editpb.identity import Identity
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy
from peers.swarm.aggregator_process import configured
from peers.watching import read_status

__all__ = ["leaves_site"]


def leaves_site(home: Path, now: float) -> tuple[Identity, tuple[Leaving, ...]]:
    """Return whose folder this is, and what leaves that site.

    A coordinator is asked for the configuration. That of a swarm is in the folder and never changes; members are asked who owns
    the parts, and how much was sent, and where none answers, that is left out.

    now: unix seconds. Raises ConfigError, RefusedError, EvictedError, and TransportError where a coordinator does not answer.
    """
    folder = PeerFolder(home)
    swarm = folder.of_swarm()
    enrolled = folder.load(now, swarm=swarm)
    policy = SitePolicy.load(home, enrolled.identity, folder.key)
    if swarm:
        folder.swarm_settings()
    status = configured(home) if swarm else asyncio.run(read_status(folder))
    return enrolled.identity, leaving(
        status,
        enrolled.identity.role,
        enrolled.endpoints,
        clip=policy.protect.clip,
        hidden=policy.protect.hide,
        gb=policy.limits.max_gb_per_day,
    )
