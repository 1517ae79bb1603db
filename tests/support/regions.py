"""A run in this process with a run above it, for what stands between the two."""

from __future__ import annotations

import torch

from edit.config.run import RunConfig, SyncConfig
from edit.local import LocalRun
from edit.regional_peer import Below, Owed, RegionalPeer, Sent
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.trainee import config

__all__ = ["ABOVE", "EVERY", "Inner", "Kept", "Site", "upper_config"]

EVERY = 3
ABOVE = "above"


class Inner:
    """One peer of a run below, with plain SGD: what it does depends on its parameters and its data alone."""

    def __init__(self, run: LocalRun, name: str, seed: int, model_seed: int) -> None:
        self.model = small_mlp(seed=model_seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.worker = EditWorker(self.model, self.optimizer, run.collective(name), WorkerConfig.of(run._config))
        self.batches = regression_batches(seed)
        self.worker.__enter__()


class Kept:
    """A memory that outlasts a region, and can be lost."""

    def __init__(self) -> None:
        self.last: Sent | None = None
        self.last_owed: Owed | None = None
        self.times = 0

    def sent(self) -> Sent | None:
        return self.last

    def keep(self, sent: Sent) -> None:
        self.last = sent
        self.times += 1

    def owed(self) -> Owed | None:
        return self.last_owed

    def keep_owed(self, owed: Owed) -> None:
        self.last_owed = Owed(owed.upper_step, {i: part.clone() for i, part in owed.residuals.items()})


class Site:
    """A run below with its peers, and the region's peer of the run above."""

    def __init__(
        self,
        upper: LocalRun,
        upper_config: RunConfig,
        name: str,
        seeds: list[int],
        model_seed: int = 0,
        **sections: object,
    ) -> None:
        self.upper, self.upper_config, self.name = upper, upper_config, name
        self.config = config(**{"codec": upper_config.codec, "sync": SyncConfig(every=EVERY, outer_steps=1000)} | sections)
        self.run = LocalRun(self.config, [f"{name}{seed}" for seed in seeds])
        self.peers = [Inner(self.run, f"{name}{seed}", seed, model_seed) for seed in seeds]
        self.memory = Kept()
        self.region = self.join()

    def join(self) -> RegionalPeer:
        self.region = RegionalPeer(
            self.run.state.schema,
            self.below(),
            self.upper.collective(self.name),
            self.upper_config,
            self.config,
            ABOVE,
            self.memory,
        )
        return self.region.__enter__()

    def crash(self) -> None:
        """The region's process is gone; whatever it knew with it."""
        self.region.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def below(self) -> Below:
        state = self.run.state
        return Below(state.outer_step, 100 * state.outer_step, state.injected, tuple(state.theta))

    def train(self, rounds: int = 1) -> None:
        """The run below takes so many outer steps."""
        for _ in range(rounds * EVERY):
            for peer in self.peers:
                train_step(peer.model, peer.optimizer, next(peer.batches))

    def hand_down(self) -> None:
        self.region.catch_up()
        accepted = self.run._injection.brings if self.run._injection is not None else None
        if (injection := self.region.injection(accepted)) is not None:
            self.run.inject(injection)

    def turn(self) -> None:
        self.train()
        self.region.moved(self.below())


def upper_config(**sections: object) -> RunConfig:
    return config(**{"sync": SyncConfig(every=EVERY, outer_steps=1000)} | sections)
