"""The peer daemon: starts and ends what one rank of a peer needs, in order, until the run has finished or a signal says stop.

One process is one rank of the peer's replica. All ranks run this code in step, and what one of them learns (a signal, an
eviction) ends all at the same point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias

import torch

from edit import plugins
from edit.command_line import otlp_protocol
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.heaps import limit_heaps
from edit.plain_text import parse_json, quoted
from edit.replica.ranks import Ranks
from edit.telemetry import telemetry
from edit.trackers.background import Trackers
from editpb.identity import Identity
from editpb.transport.send_limit import UNLIMITED, SendLimit, send_limit
from peers.carriers.hub.all_aggregators import AllAggregators, connect_hub
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import NOWHERE, Site
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Interrupted
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.policy import SitePolicy
from peers.identity.renewal import Renewal
from peers.identity.seeking import Seeking, searching
from peers.own_site import site_of
from peers.training.checkpoint import needs_no_snapshot
from peers.training.loop import Place, Training
from peers.training.metrics import Metrics
from peers.training.options import PeerOptions
from peers.training.sharding import make_layout, process_group
from peers.training.torchrun import ALONE, Launch, launched
from peers.training.trainer import choose_device, use_threads

__all__ = ["PeerOptions", "attend", "run_peer", "server_of", "stopping", "train", "with_policy"]

_log = logging.getLogger("peers")


def run_peer(options: PeerOptions) -> None:
    """Run one rank of a peer to the end of its run, or to the first SIGINT or SIGTERM (a second one ends the process at once).

    Raises ConfigError, RefusedError, EvictedError.
    """
    enrolled = PeerFolder(options.home).load(time.time())
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{options.home}: enrolled as {enrolled.identity.role}; training needs an invitation with role peer")
    options = with_policy(options, enrolled.identity)
    launch = launched()
    if options.dht_peers and launch.size > 1:
        raise ConfigError(f"--dht-peers: a coordinator is not looked for by {launch.size} ranks; leave it out")
    device = choose_device(options.device, launch)
    use_threads(options.threads)
    limit_heaps()
    limit = send_limit(options.max_mbit, options.home, options.policy.limits.max_gb_per_day)
    server = server_of(options, enrolled, launch, limit)
    with process_group(launch, device):
        channels = Channels(enrolled.endpoints, enrolled.credentials, limit)
        renewal = Renewal(PeerFolder(options.home), enrolled, channels, asks=launch.local_rank == 0)
        seeking = Seeking(channels, searching(options.home, options.dht_peers)) if options.dht_peers else None
        folder = PeerFolder(options.home)
        site = site_of(options.policy, folder, MaskFolder(folder.revealed, options.members))
        attend(options, channels, enrolled.identity, device, launch, server, renewal, seeking, site)


def with_policy(options: PeerOptions, identity: Identity) -> PeerOptions:
    """Return the options with what the peer's site allows. Raises ConfigError where policy.toml and --members contradict."""
    policy = SitePolicy.load(options.home, identity, PeerFolder(options.home).key)
    return dataclasses.replace(options, policy=policy, members=policy.members(options.members, "--members"))


def server_of(options: PeerOptions, enrolled: Enrolment, launch: Launch, limit: SendLimit = UNLIMITED) -> SnapshotServer | None:
    """Return the server of this peer's snapshots, where the operator wants one. Raises ConfigError where there can be none."""
    if (listen := options.serve_snapshots) is None:
        return None
    if launch.size > 1:
        raise ConfigError(f"--serve-snapshots: a rank of {launch.size} holds only its part of the parameters; leave it out")
    if enrolled.serving is None:
        raise ConfigError(
            f"--serve-snapshots: the certificate in {options.home} is from before peers could serve; ask for a new invitation "
            f"for {enrolled.identity.peer_id} and run: edit-peer join INVITATION --home {quoted(options.home)}"
        )
    return SnapshotServer(enrolled.run_id, enrolled.serving, listen, options.serving_host, limit=limit)


def attend(
    options: PeerOptions,
    channels: Channels,
    identity: Identity,
    device: torch.device,
    launch: Launch = ALONE,
    server: SnapshotServer | None = None,
    renewal: Renewal | None = None,
    seeking: Seeking | None = None,
    site: Site = NOWHERE,
) -> None:
    """Train as `identity` in the run that `channels` lead to; `run_peer` looks these up in the peer's folder.

    A replica of several ranks calls it at each, inside their process group.

    renewal: keeps the certificate of `channels` renewed meanwhile. seeking: looks for a coordinator that is lost. site: this
    peer's.
    """

    def connect(io: IoThread, ranks: Ranks) -> Connecting:
        if renewal is not None:
            io.spawn(renewal.keep())
        if seeking is not None:
            io.spawn(seeking.keep())
        return connect_hub(io, channels, identity, ranks, server, site=site)

    train(options, connect, identity, device, launch)


Connecting: TypeAlias = AbstractContextManager[tuple[AllAggregators, RunConfig, int]]


def train(
    options: PeerOptions,
    connect: Callable[[IoThread, Ranks], Connecting],
    identity: Identity,
    device: torch.device,
    launch: Launch = ALONE,
) -> bool:
    """Train as `identity` in the run that `connect` connects this rank to, as `connect_hub` does.

    Returns whether the run has finished; False: this process was asked to stop.

    A replica of several ranks calls it at each, inside their process group. connect may be asked to stop: it lets Interrupted
    pass.
    """
    ranks = Ranks.world()
    ranks.same("the identity in --home", identity.uri)
    with ExitStack() as at_last, IoThread() as io, Metrics(options.metrics if ranks.leads else None) as metrics, stopping(io):
        try:
            with connect(io, ranks) as (connection, config, run_step):
                _log.info("%s of run %s: %s", identity.peer_id, identity.run_id, config.model.name)
                plugins.admit(config, options.allowed, ("codecs", "models"))
                layout = make_layout(launch, options.tensor_parallel, config.inner.batch_size, device)
                place = Place(identity=identity, device=device, layout=layout, ranks=ranks, restarts=launch.restarts)
                if run_step > 0 and not (_resumes(options) and needs_no_snapshot(options.checkpoint_folder, config, run_step)):
                    connection.prefetch()
                trackers = at_last.enter_context(_trackers(options, config, identity) if ranks.leads else Trackers())
                protocol = otlp_protocol() if ranks.leads else ""
                told = at_last.enter_context(telemetry(protocol, "edit-peer", identity.run_id, identity.peer_id))
                Training(options, config, place, connection, metrics, trackers, told).run(run_step)
        except Interrupted:
            _log.info("stopping as asked")
            return False
    return True


def _resumes(options: PeerOptions) -> bool:
    return options.checkpoint_every > 0 and not options.fresh


def _trackers(options: PeerOptions, config: RunConfig, identity: Identity) -> Trackers:
    settings = parse_json(config.to_json())
    return options.trackers.open(identity.run_id, config.name, identity.peer_id, options.trackers_folder, settings)


@contextlib.contextmanager
def stopping(io: IoThread) -> Iterator[None]:
    """End waits, and with them the loop, at the first SIGINT or SIGTERM; a second one ends the process at once.

    An Interrupted that nobody has caught becomes KeyboardInterrupt: the command ends as by Ctrl-C.
    """

    def stop(*_: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        io.interrupt()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
