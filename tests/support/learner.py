"""A peer of a real run with a model and data of its own, in the test's process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from edit.collective import Collective
from edit.config.run import RunConfig
from edit.worker.worker import EditWorker, WorkerConfig

__all__ = ["Learner"]


@dataclass
class Learner:
    """All begin with the same model; the data differ by name."""

    name: str
    collective: Collective
    settings: RunConfig
    model: nn.Module = field(init=False)
    worker: EditWorker = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.worker = EditWorker(self.model, self.optimizer, self.collective, WorkerConfig.of(self.settings))
        self.draw = torch.Generator().manual_seed(ord(self.name))

    def step(self) -> None:
        """Take one optimizer step."""
        inputs, targets = torch.randn(5, 6, generator=self.draw), torch.randn(5, 3, generator=self.draw)
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
