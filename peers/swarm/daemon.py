"""Trains in a swarm: starts this member's host, connects to all parts, and ends the host after the training."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.heaps import limit_heaps
from edit.replica.ranks import Ranks
from editpb.transport.send_limit import SendLimit, send_limit
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.channels import Channels
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted
from peers.carriers.swarm.connect import connect_swarm
from peers.carriers.swarm.hosts import hosts_of_swarm
from peers.daemon import train
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal
from peers.swarm.aggregator_process import HostProcess
from peers.training.options import PeerOptions
from peers.training.torchrun import launched
from peers.training.trainer import choose_device, use_threads

__all__ = ["run_member"]

_log = logging.getLogger("peers")


def run_member(options: PeerOptions, prepare: Callable[[], list[str]], serving: Callable[[], None] = lambda: None) -> None:
    """Train as a member of a swarm to the end of its run, or to the first SIGINT or SIGTERM.

    Args:
        prepare: makes options.home a member's folder, if it is not, and returns what its host is told.
        serving: is called once the host serves.

    Raises ConfigError, RefusedError, EvictedError, and whatever the host ended with.
    """
    launch = launched()
    if launch.size > 1:
        raise ConfigError(f"rank {launch.rank} of {launch.size}: in a swarm a peer is one process")
    device = choose_device(options.device, launch)
    use_threads(options.threads)
    limit_heaps()
    arguments = prepare()
    folder = PeerFolder(options.home)
    enrolled = folder.load(time.time(), swarm=True)
    limit = send_limit(options.max_mbit, options.home)
    host = HostProcess(options.home, arguments)
    finished = False
    try:
        host.wait_ready()
        serving()
        finished = train(options, partial(_connect, host, folder, enrolled, limit), enrolled.identity, device, launch)
        if finished:
            _log.info("the host stays until the other members have the last outer step; Ctrl-C ends it at once")
    finally:
        host.close(linger=finished)


@contextlib.contextmanager
def _connect(
    host: HostProcess, folder: PeerFolder, enrolled: Enrolment, limit: SendLimit, io: IoThread, ranks: Ranks
) -> Iterator[tuple[AllAggregators, RunConfig, int]]:
    """Connect to all parts; a host that fails ends it."""
    host.on_failure(io.interrupt)
    try:
        hosts, parts = io.call(hosts_of_swarm(host.wait_ready(), enrolled.identity, enrolled.credentials))

        async def keep(channels: Channels) -> None:  # the host renews the certificate that lies in the folder
            await Renewal(folder, enrolled, channels, asks=False).keep()

        with connect_swarm(io, hosts, parts, enrolled.credentials, enrolled.identity, ranks, limit, keep=keep) as connected:
            yield connected
    except Interrupted:
        if host.failure is not None:
            raise host.failure from None
        raise
