"""Trains in a swarm: starts this member's host, connects to all parts, and ends the host after the training.

Of several ranks rank 0 has the host; the others are connected to all parts by themselves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from edit.config.run import RunConfig
from edit.config.validation import require
from edit.heaps import limit_heaps
from edit.replica.ranks import Ranks
from edit.trust.signatures import Signer
from editpb.transport.send_limit import SendLimit, send_limit
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from peers.carriers.rank_agreement import RankAgreement
from peers.carriers.run_connection import Interrupted
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.connect import connect_swarm
from peers.carriers.swarm.hosts import describe_swarm, hosts_of
from peers.carriers.swarm.seen_log import SeenLog
from peers.daemon import train, with_policy
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.policy import SitePolicy
from peers.identity.renewal import Renewal
from peers.swarm.aggregator_process import HostProcess, parameters_of
from peers.training.options import PeerOptions
from peers.training.sharding import process_group
from peers.training.torchrun import Launch, launched
from peers.training.trainer import choose_device, use_threads

__all__ = ["check_settings", "run_member"]

_log = logging.getLogger("peers")


def run_member(options: PeerOptions, prepare: Callable[[], list[str]], serving: Callable[[], None] = lambda: None) -> None:
    """Run one rank of a member that trains to the end of its run, or to the first SIGINT or SIGTERM.

    Args:
        prepare: makes options.home a member's folder, if it is not, and returns what its host is told; called at rank 0.
        serving: is called once the host serves, there too.

    Raises ConfigError, RefusedError, EvictedError, and whatever the host ended with.
    """
    launch = launched()
    device = choose_device(options.device, launch)
    use_threads(options.threads)
    limit_heaps()
    # The other ranks wait for the process group.
    host = HostProcess(options.home, _allowed(options.home, prepare())) if launch.leads else None
    finished = False
    try:
        with process_group(launch, device):
            folder = PeerFolder(options.home)
            enrolled, limit = folder.load(time.time(), swarm=True), send_limit(options.max_mbit, options.home)
            options = with_policy(options, enrolled.identity)
            connect = partial(_connect, launch, host, folder, enrolled, limit, serving, options.policy)
            finished = train(options, connect, enrolled.identity, device, launch)
        if finished:
            _log.info("the host stays until the other members have the last outer step; Ctrl-C ends it at once")
    finally:
        if host is not None:
            host.close(linger=finished)


def _allowed(home: Path, arguments: list[str]) -> list[str]:
    """Return what the host is told, once the site allows the run's settings, as far as they are here. Raises ConfigError.

    Where the site has a policy, a new member asks others for them before. Else its host is told them when it is let in; then
    the peer looks before it trains, and ends its host.
    """
    folder = PeerFolder(home)
    known = (home / "run.toml").exists()
    if not known and SitePolicy.load(home, folder.load(swarm=True).identity, folder.key).has_say:
        parameters_of(home, arguments)
    check_settings(home)
    return arguments


def check_settings(home: Path) -> None:
    """Raise ConfigError unless policy.toml and consent.json of a member's folder allow the settings in it, if any are, and
    what its peer has seen of the audit log can be used: all that can be known before its host joins."""
    if (path := home / "run.toml").exists():
        folder, config = PeerFolder(home), RunConfig.from_toml(path)
        identity = folder.load(swarm=True).identity
        SitePolicy.load(home, identity, folder.key).check(config.to_json(), config)
        if config.audit.enabled and config.swarm is not None:
            for part in range(config.swarm.parts):
                SeenLog.open(home, part, identity, Signer(folder.key()))


def check_ranks(config: RunConfig, size: int) -> None:
    """Raise ConfigError where a member of so many ranks cannot train with these settings."""
    rule = f"needs members of one rank each, and this one has {size}: a swap is of the whole model"
    require(size == 1 or config.outer.algorithm == "mean", "outer.algorithm", config.outer.algorithm, rule)


@contextlib.contextmanager
def _connect(
    launch: Launch,
    host: HostProcess | None,
    folder: PeerFolder,
    enrolled: Enrolment,
    limit: SendLimit,
    serving: Callable[[], None],
    policy: SitePolicy,
    io: IoThread,
    ranks: Ranks,
) -> Iterator[tuple[AllAggregators, RunConfig, int]]:
    """Connect to all parts, once the host serves; a host that fails ends it. host: at rank 0."""
    identity, credentials = enrolled.identity, enrolled.credentials
    agreement = RankAgreement(io, ranks, lambda: io.trouble)
    if host is not None:
        host.at_its_end(io.interrupt)
    try:
        own = agreement.decide(lambda: host.ready if host is not None else None)
        ranks.lead(serving)
        swarm = agreement.on_leader(lambda: describe_swarm(own, identity, credentials))
        here = launch.rank == launch.local_rank  # on the machine of rank 0
        hosts = ranks.together(lambda: hosts_of(swarm, identity.peer_id, own if here else ""))

        async def keep(channels: PartChannels) -> None:
            """On the machine of rank 0 the host renews the certificate that lies in the folder."""
            asks = not here and launch.local_rank == 0
            await Renewal(folder, enrolled, channels, asks=asks, hosts=lambda: channels.hosts).keep()

        site = Site(key=folder.key(), check=policy.check, hide=policy.protect.hide)
        with connect_swarm(
            io,
            hosts,
            swarm.parts,
            credentials,
            identity,
            ranks,
            limit,
            site=site,
            home=folder.path,
            keep=keep,
        ) as connected:
            check_ranks(connected[1], launch.size)
            yield connected
    except Interrupted:
        if host is not None and host.failure is not None:
            raise host.failure from None
        raise
