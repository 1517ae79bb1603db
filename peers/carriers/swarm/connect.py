"""A peer's connection to all parts of a swarm's model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from edit.config.run import RunConfig
from edit.replica.ranks import ALONE, Ranks
from edit.trust.signatures import Signer
from editpb.identity import Identity
from editpb.signed_contributions import config_digest
from editpb.transport.send_limit import UNLIMITED, SendLimit
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.collective import read_configuration
from peers.carriers.hub.control_stream import ConfigParser
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import leaving
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.owners import OwnerWatch
from peers.carriers.swarm.receipts import ReceiptChecks
from peers.carriers.swarm.waiting import WaitingNews

__all__ = ["connect_swarm"]


@contextmanager
def connect_swarm(
    io: IoThread,
    hosts: Mapping[str, str],
    parts: int,
    credentials: grpc.ChannelCredentials,
    identity: Identity,
    ranks: Ranks = ALONE,
    limit: SendLimit = UNLIMITED,
    *,
    site: Site = NOWHERE,
    home: Path | None = None,
    keep: Callable[[PartChannels], Coroutine[Any, Any, None]] | None = None,
    ended: str = "the run has finished",
    failed: str = "the peer failed",
) -> Iterator[tuple[AllAggregators, RunConfig, int]]:
    """Connect one rank of a peer to its swarm; all ranks of the replica call it together.

    Yields the connection, the run's configuration and an outer step that every part has reached. Waits for parts that nobody
    serves yet. Leaving says goodbye and closes everything. Raises ConfigError, RefusedError, EvictedError, Interrupted.

    Args:
        io: the I/O thread.
        hosts: HOST:PORT of the hosts that are known, by peer_id; this peer's own first.
        parts: that the model is cut into.
        credentials: of this peer.
        limit: of what is sent.
        site: this peer's; no round is masked here, and the log has no receipts of a coordinator.
        home: its folder, where a run has an audit log: what its own host's log says of it is checked; None: it is not.
        keep: a task that renews the credentials of the channels that it is given.
        ended, failed: what the goodbye says.
    """
    own_takes = next(iter(hosts)) == identity.peer_id
    channels = [PartChannels(identity.run_id, hosts, part, credentials, limit, own_takes=own_takes) for part in range(parts)]
    for each in channels[1:]:
        each.share(channels[0])
    if keep is not None:
        io.spawn(keep(channels[0]))
    parser = ConfigParser(site.check)
    watch = OwnerWatch(identity.run_id, channels)
    io.spawn(watch.run())  # before anything is read: an owner may have moved since `hosts` was written down
    try:
        read = [read_configuration(io, each, identity, ranks, parser) for each in channels]
    except BaseException:
        io.post(watch.stop)
        raise
    config = read[0][0]
    checks: ReceiptChecks | None = None

    def check() -> None:
        nonlocal checks
        if home is not None and own_takes:
            signer, alone = Signer(site.key), ranks.size == 1
            checks = ReceiptChecks(identity, channels[0], config_digest(config), signer, home, parts, alone=alone)

    if home is not None and config.audit.enabled and site.key:
        ranks.lead(check)
    followers = checks.parts if checks is not None else ()
    hub = AllAggregators(io, channels, identity, ranks, parser, site=site, followers=followers)
    with leaving(hub, ended, failed) as connection:
        waiting = WaitingNews(identity, channels[0], lambda: [one.awaits for one in connection.shares])
        if ranks.leads and own_takes:
            io.spawn(waiting.run())
        if checks is not None:
            io.spawn(checks.run())
        try:
            yield connection, config, min(outer_step for _, outer_step in read)
            if checks is not None:
                io.call(checks.last())
        finally:
            if checks is not None:
                io.post(checks.stop)
            io.post(watch.stop)
            io.post(waiting.stop)
