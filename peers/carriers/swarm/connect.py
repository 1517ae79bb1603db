"""A peer's connection to all parts of a swarm's model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from edit.config.run import RunConfig
from edit.replica.ranks import ALONE, Ranks
from editpb.identity import Identity
from editpb.transport.send_limit import UNLIMITED, SendLimit
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.collective import read_configuration
from peers.carriers.hub.control_stream import ConfigParser
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import leaving
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.owners import OwnerWatch
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
        site: this peer's; no round is masked here, and the log has no receipts.
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
    read = [read_configuration(io, each, identity, ranks, parser) for each in channels]
    watch = OwnerWatch(identity.run_id, channels)
    with leaving(AllAggregators(io, channels, identity, ranks, parser, site=site), ended, failed) as connection:
        waiting = WaitingNews(identity, channels[0], lambda: [one.awaits for one in connection.shares])
        io.spawn(watch.run())
        if ranks.leads and own_takes:
            io.spawn(waiting.run())
        try:
            yield connection, read[0][0], min(outer_step for _, outer_step in read)
        finally:
            io.post(watch.stop)
            io.post(waiting.stop)
