"""A peer of a LocalRun with a model and data of its own, and the run's configuration with everything lossy turned off."""

from __future__ import annotations

import torch

from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig
from edit.local import LocalRun
from edit.worker.worker import EditWorker
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.settings import worker_config

EXACT = CodecConfig(up="fp32", down="fp32")
FOLLOW = OuterConfig(optimizer="sgd", lr=1.0)
DILOCO = PenaltyConfig(enabled=False)


class Trainee:
    """One peer of a LocalRun with its own non-IID data."""

    def __init__(self, run: LocalRun, peer_id: str, seed: int, every: int, codec: str = "fp32", lr: float = 1e-2) -> None:
        self.model = small_mlp(seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.worker = EditWorker(self.model, self.optimizer, run.collective(peer_id), worker_config(every=every, codec=codec))
        self.batches = regression_batches(seed)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            train_step(self.model, self.optimizer, next(self.batches))


def config(**sections: object) -> RunConfig:
    return RunConfig(**{"outer": FOLLOW, "penalty": DILOCO, "codec": EXACT} | sections)  # type: ignore[arg-type]
