"""One peer on `small_mlp` with a scripted carrier, and how to read its parameters as fragments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edit.records import Snapshot, Verdict
from edit.worker.worker import EditWorker
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps
from tests.support.settings import worker_config

BOTH_OK = [Verdict.OK, Verdict.OK]
FRAGMENTS = (0, 2)  # the layers of small_mlp that have parameters


def flat(model: nn.Module) -> list[Tensor]:
    """The fragments `0` and `2` of small_mlp, as the worker orders them."""
    return [
        torch.cat([p.detach().float().flatten() for p in layer.parameters()])
        for layer in model.children()
        if [*layer.parameters()]
    ]


def same(a: list[Tensor] | tuple[Tensor, ...], b: list[Tensor] | tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass
class Peer:
    """A worker on small_mlp with its script."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    collective: ScriptedCollective
    worker: EditWorker
    batches: Iterator[tuple[Tensor, Tensor]]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            train_step(self.model, self.optimizer, next(self.batches))

    def forward(self) -> None:
        self.model(next(self.batches)[0])

    @property
    def theta(self) -> Snapshot:
        return Snapshot(self.worker.outer_step, self.worker.digest, tuple(outer_vectors(self.worker)))


def outer_vectors(worker: EditWorker) -> list[Tensor]:
    state = worker.outer_state_dict()
    return [
        torch.cat([state[f"{i}.weight"].flatten(), state[f"{i}.bias"]])
        for i in sorted({int(name.split(".")[0]) for name in state})
    ]


def entered_peer(
    every: int = 2, codec: str = "fp32", dtype: torch.dtype = torch.float32, theta: Snapshot | None = None
) -> Peer:
    """A peer that has just entered the run."""
    model = small_mlp(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    collective = ScriptedCollective(theta)
    worker = EditWorker(model, optimizer, collective, worker_config(every=every, codec=codec))
    worker.__enter__()
    return Peer(model, optimizer, collective, worker, regression_batches(0, dtype))


def commit_next(p: Peer, verdicts: list[Verdict | None] | None = None, seed: int = 0, clip: float = 1.0) -> Snapshot:
    """Script a commit as the answer about the present outer step; returns theta after it."""
    answer, after = committed(p.theta, random_steps(p.theta, seed), BOTH_OK if verdicts is None else verdicts, clip=clip)
    p.collective.answers[p.worker.outer_step].append(answer)
    return after


def residuals(p: Peer) -> list[Tensor]:
    """What the codec still owes of each fragment, as a checkpoint has it."""
    kept = p.worker.state_dict().get("residual", {})
    empty = [torch.zeros(outer.numel()) for outer in p.theta.fragments]
    return [
        torch.cat([kept[f"{i}.weight"].flatten(), kept[f"{i}.bias"]]) if f"{i}.weight" in kept else zeros
        for i, zeros in zip(FRAGMENTS, empty, strict=True)
    ]
