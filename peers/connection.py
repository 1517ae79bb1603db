"""`peers.connect`: a connected collective for a user's own training loop, without the daemon.

Owns: opening and closing what a collective needs, in order. Must not know: models, optimizers, loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from peers.carriers.hub.all_aggregators import AllAggregators, agreed_configuration
from peers.carriers.hub.channels import Channels
from peers.carriers.io_thread import IoThread
from peers.identity.peer_folder import Home
from peers.training.torchrun import launched

__all__ = ["connect"]


@contextmanager
def connect(home: Path | str, ranks: Ranks | None = None) -> Iterator[tuple[AllAggregators, RunConfig]]:
    """The run that `home` is enrolled in: (what `EditWorker` and the callbacks take as collective, configuration). Leaving says
    goodbye and closes the connections.

    home: a folder that `edit-peer join` has made. ranks: of this replica; by itself all processes of the initialised
    torch.distributed world, or this one alone; under torchrun initialise torch.distributed first. Waits for a coordinator that
    is not there yet. Raises ConfigError, RefusedError, EvictedError.
    """
    enrolled = Home(Path(home)).load(time.time())
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; training needs an invitation with role peer")
    ranks = _world() if ranks is None else ranks
    dial = Channels(enrolled.endpoints, enrolled.credentials)
    with IoThread() as bridge:
        config, _ = agreed_configuration(bridge, dial, enrolled.identity, ranks)
        collective = AllAggregators(bridge, dial, enrolled.identity, config, ranks)
        goodbye = "the training failed"
        try:
            yield collective, config
            goodbye = "the training has ended"
        finally:
            collective.close(goodbye)


def _world() -> Ranks:
    launch = launched()
    if launch.size > 1 and not dist.is_initialized():
        raise ConfigError(
            f"peers.connect: this is rank {launch.rank} of {launch.size}, but torch.distributed is not initialised; do that "
            "first (init_process_group; with a transformers Trainer: make the TrainingArguments)"
        )
    return Ranks.world()
