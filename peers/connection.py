"""`peers.connect`: a connected collective for a user's own training loop, without the daemon."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from edit import plugins
from edit.config.run import InnerConfig, RunConfig
from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from editpb.transport.send_limit import send_limit
from peers.carriers.hub.all_aggregators import AllAggregators, connect_hub
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.io_thread import IoThread
from peers.forks import GRPC_CAME_FIRST
from peers.identity.known_members import read_members
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy
from peers.identity.renewal import Renewal
from peers.own_site import site_of
from peers.training.torchrun import launched

__all__ = ["connect", "without_effect"]

log = logging.getLogger(__name__)


@contextmanager
def connect(
    home: Path | str,
    ranks: Ranks | None = None,
    *,
    max_mbit: float | None = None,
    allow: Collection[str] = (),
    members: Path | str | None = None,
) -> Iterator[tuple[AllAggregators, RunConfig]]:
    """Connect to the run that `home` is enrolled in; wait for a coordinator that is not there yet.

    Yields what `EditWorker` and the callbacks take as collective, and the run's configuration. One training per connection:
    connect again for another. Leaving says goodbye and closes the connections. The connection is of this process: one that is
    forked from it, or that it would have to be copied to (Lightning's strategies ddp_fork, ddp_spawn), connects itself, which a
    start of the ranks by torchrun does. Raises ConfigError, RefusedError, EvictedError.

    Args:
        home: a folder that `edit-peer join` has made.
        ranks: of this replica; None: all processes of the initialised torch.distributed world, or this one alone. Under
            torchrun initialise torch.distributed first. The `EditWorker` must be of the same: it is alone by default, unless
            its model is sharded or in DistributedDataParallel; else give it `Ranks.world()` (`edit.replica.ranks`).
        max_mbit: what this peer sends per second, in 10^6 bits, as `edit-peer run --max-mbit`; None: no bound.
        allow: names of codecs that are plug-ins, which you trust; as `edit-peer run --allow`.
        members: a file of the members that you know; in a run with secagg.enabled this peer shares keys with no other, and with
            audit.enabled it stops when the log names another key of one. Of several lines of a name the last one is the present
            key. As `edit-peer run --members`.
    """
    folder = PeerFolder(Path(home))
    enrolled = folder.load(time.time())
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; training needs an invitation with role peer")
    policy = SitePolicy.load(Path(home), enrolled.identity, folder.key)
    listed = read_members(Path(members)) if members is not None else None
    known = MaskFolder(folder.revealed, policy.members(listed, "members"))
    ranks = _world() if ranks is None else ranks
    channels = Channels(
        enrolled.endpoints, enrolled.credentials, send_limit(max_mbit, Path(home), policy.limits.max_gb_per_day)
    )
    renewal = Renewal(folder, enrolled, channels, asks=ranks.leads or launched().local_rank == 0)
    ended, failed = "the training has ended", "the training failed"
    with IoThread() as io:
        io.spawn(renewal.keep())
        hub = connect_hub(
            io,
            channels,
            enrolled.identity,
            ranks,
            site=site_of(policy, folder, known, clip=policy.protect.clip),
            ended=ended,
            failed=failed,
        )
        with hub as (collective, config, _):
            plugins.admit(config, allow, ("codecs",))
            for line in (*_forks(), *without_effect(config)) if ranks.rank == 0 else ():
                log.warning("%s", line)
            yield collective, config


def without_effect(config: RunConfig) -> list[str]:
    """Return what of the run's configuration says nothing to a loop of one's own, each a line for the log."""
    lines = []
    if config.inner != InnerConfig():
        lines.append(
            "run.toml's [inner] is for edit-peer run: here the optimizer, its schedule and the batches are your own loop's"
        )
    name, options = config.model.name, config.model.options
    if name.startswith("hf:") or options:
        lines.append(
            f"run.toml's [model] {name} is built by edit-peer run: here the model is your own loop's; its parameters must have "
            "the names and shapes of the other peers'"
        )
    return lines


def _forks() -> list[str]:
    if not GRPC_CAME_FIRST:
        return []
    remedy = "import peers first, or set GRPC_ENABLE_FORK_SUPPORT=0 in the environment"
    return [f"gRPC was imported before peers: a DataLoader's workers may abort; {remedy}"]


def _world() -> Ranks:
    launch = launched()
    if launch.size > 1 and not dist.is_initialized():
        raise ConfigError(
            f"peers.connect: this is rank {launch.rank} of {launch.size}, but torch.distributed is not initialised; do that "
            "first (init_process_group; with a transformers Trainer: make the TrainingArguments)"
        )
    return Ranks.world()
