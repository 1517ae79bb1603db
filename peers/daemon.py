"""The peer daemon: attends a run, trains, exchanges, until the run has finished or a signal says stop.

Owns: the order of starting and ending, signals. One process is one rank of the peer's replica; all ranks run this code in step,
and what one of them is told (a signal, an eviction) ends all at the same point. Must not know: how anything is sent, what a
round computes, the training loop.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from editpb.identity import Identity
from peers.carriers.hub.all_aggregators import AllAggregators, agreed_configuration
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.snapshot_server import SnapshotServer
from peers.carriers.io_thread import Interrupted, IoThread
from peers.identity.peer_folder import Enrolled, Home
from peers.training.loop import Place, Training
from peers.training.metrics import Metrics
from peers.training.options import PeerOptions
from peers.training.sharding import lay_out, process_group
from peers.training.torchrun import ALONE, Launch, launched
from peers.training.trainer import choose_device, use_threads

__all__ = ["PeerOptions", "attend", "leaving", "run_peer", "server_of", "stopping"]

_log = logging.getLogger("peers")
_Connected = TypeVar("_Connected", HubCollective, AllAggregators)


def run_peer(options: PeerOptions) -> None:
    """Run one rank of a peer to the end of its run, or to the first SIGINT or SIGTERM (a second one ends the process at once).

    Raises ConfigError, RefusedError, EvictedError.
    """
    enrolled = Home(options.home).load(time.time())
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{options.home}: enrolled as {enrolled.identity.role}; training needs an invitation with role peer")
    launch = launched()
    device = choose_device(options.device, launch)
    use_threads(options.threads)
    server = server_of(options, enrolled, launch)
    with process_group(launch, device):
        attend(options, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity, device, launch, server)


def server_of(options: PeerOptions, enrolled: Enrolled, launch: Launch) -> SnapshotServer | None:
    """The server of snapshots, where the operator wants one. Raises ConfigError where there can be none."""
    if (listen := options.serve_snapshots) is None:
        return None
    if launch.size > 1:
        raise ConfigError(f"--serve-snapshots: a rank of {launch.size} holds only its part of the parameters; leave it out")
    if enrolled.serving is None:
        raise ConfigError(
            f"--serve-snapshots: the certificate in {options.home} is from before peers could serve; ask for a new invitation "
            f"for {enrolled.identity.peer_id} and run: edit-peer join INVITATION --home {options.home}"
        )
    return SnapshotServer(enrolled.run_id, enrolled.serving, listen, options.serving_host)


def attend(
    options: PeerOptions,
    dial: Channels,
    identity: Identity,
    device: torch.device,
    launch: Launch = ALONE,
    server: SnapshotServer | None = None,
) -> None:
    """Train as `identity` in the run at the other end of `dial`; as `run_peer`, which looks these up in the peer's folder.

    A replica of several ranks calls it at each, inside their process group.
    """
    ranks = Ranks.world()
    ranks.same("the identity in --home", identity.uri)
    with (
        IoThread() as bridge,
        Metrics(options.metrics if ranks.leads else None) as metrics,
        stopping(bridge),
        _serving(bridge, server),
    ):
        try:
            config, run_step = agreed_configuration(bridge, dial, identity, ranks)
            _log.info("%s of run %s: %s", identity.peer_id, identity.run_id, config.model.name)
            layout = lay_out(launch, options.tensor_parallel, config.inner.batch_size, device)
            place = Place(identity=identity, device=device, layout=layout, ranks=ranks, restarts=launch.restarts)
            if server is not None and config.aggregators.addresses:
                count = config.aggregators.count
                raise ConfigError(f"--serve-snapshots: not in a run of {count} aggregators, with a part each; leave it out")
            with leaving(AllAggregators(bridge, dial, identity, config, ranks)) as collectives:
                if server is not None:
                    collectives[0].serves(server)
                if run_step > 0:
                    collectives.prefetch()
                Training(options, config, place, collectives, bridge, metrics, server).run(run_step)
        except Interrupted:
            _log.info("stopping as told")


@contextlib.contextmanager
def leaving(collectives: _Connected) -> Iterator[_Connected]:
    """Says goodbye at the end, and why."""
    goodbye = "the peer failed"
    try:
        yield collectives
        goodbye = "the run has finished"
    except Interrupted:
        goodbye = "the peer was told to stop"
        raise
    finally:
        collectives.close(goodbye)


@contextlib.contextmanager
def _serving(bridge: IoThread, server: SnapshotServer | None) -> Iterator[None]:
    """Listens for those who read snapshots."""
    if server is None:
        yield
        return
    _log.info("serving snapshots at %s", bridge.call(server.start()))
    try:
        yield
    finally:
        bridge.resume()
        bridge.call(server.close())


@contextlib.contextmanager
def stopping(bridge: IoThread) -> Iterator[None]:
    """The first signal ends waits and, after it, the loop; then the default action is back, so a second one kills."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        bridge.interrupt()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
