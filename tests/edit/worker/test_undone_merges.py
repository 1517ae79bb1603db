"""An optimizer that writes its own copy of the parameters into them undoes what others have contributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from edit.config.algorithm import OuterConfig
from edit.local import LocalRun
from edit.records import Snapshot
from edit.worker import undone_merges
from edit.worker.worker import EditWorker
from tests.support.models import TinyTransformer, regression_batches, small_mlp, token_batches, train_step
from tests.support.scripted import ScriptedCollective
from tests.support.scripted_peer import Peer, commit_next
from tests.support.settings import worker_config
from tests.support.trainee import config

UNDONE = "each of the last 3 merges was undone by the next optimizer step: if MasterWeights writes a copy of the parameters"


class MasterWeights(torch.optim.Optimizer):
    """AdamW on fp32 copies, which each step writes into the model's bf16 parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {})
        self.masters = [parameter.detach().float().clone() for parameter in model.parameters()]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for master, parameter in zip(self.masters, group["params"], strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for master, parameter in zip(self.masters, group["params"], strict=True):
            parameter.copy_(master)


@pytest.fixture(autouse=True)
def all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model some are too few."""
    monkeypatch.setattr(undone_merges, "_EVERY", 1)


def peer(model: nn.Module, optimizer: torch.optim.Optimizer, theta: Snapshot | None = None, **sync: Any) -> Peer:
    collective = ScriptedCollective(theta)
    worker = EditWorker(model, optimizer, collective, worker_config(**{"codec": "fp32", "every": 4} | sync))
    worker.__enter__()
    return Peer(model, optimizer, collective, worker, regression_batches(0, next(model.parameters()).dtype))


def train(p: Peer, rounds: int, every: int = 4) -> None:
    for seed in range(rounds):
        p.step(every)
        commit_next(p, seed=seed)


@pytest.mark.parametrize("sync", [{"mode": "blocking"}, {"mode": "forward"}, {"mode": "delayed", "delay": 2}])
class TestMasterWeights:
    def test_a_warning_after_the_third_merge_that_is_undone(
        self, sync: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        model = small_mlp(dtype=torch.bfloat16)
        p = peer(model, MasterWeights(model), **sync)
        train(p, 3)
        assert UNDONE not in caplog.text
        train(p, 4)
        assert caplog.text.count(UNDONE) == 1

    def test_none_for_the_same_optimizer_without_copies(self, sync: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        model = small_mlp(dtype=torch.bfloat16)
        p = peer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **sync)
        train(p, 7)
        assert p.worker.outer_step >= 5 and not caplog.text


def test_what_entering_the_run_loads_counts_as_a_merge(caplog: pytest.LogCaptureFixture) -> None:
    founder = small_mlp(seed=1, dtype=torch.bfloat16)
    theta = peer(founder, MasterWeights(founder)).theta
    model = small_mlp(seed=2, dtype=torch.bfloat16)
    p = peer(model, MasterWeights(model), theta)
    train(p, 2)
    assert UNDONE not in caplog.text
    train(p, 1)
    assert UNDONE in caplog.text and p.worker.outer_step == theta.outer_step + 2


def test_some_values_of_a_larger_model_are_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.undo()
    model = nn.Sequential(nn.Linear(4, 8192), nn.Tanh(), nn.Linear(8192, 3)).bfloat16()
    train(peer(model, MasterWeights(model)), 4)
    assert UNDONE in caplog.text


def test_steps_that_change_nothing_undo_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = small_mlp()
    p = peer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    begun = p.worker.outer_step
    train(p, 6)
    assert p.worker.outer_step == begun + 5 and not caplog.text


@pytest.mark.parametrize(
    ("sync", "lr"),
    [
        ({"every": 8, "mode": "delayed", "mix": "replace"}, 1.0),
        ({"every": 8, "mode": "delayed", "mix": "lerp", "delay": 2}, 1.0),
        ({"every": 3}, 0.7),
        ({"every": 1}, 0.1),
    ],
)
def test_a_merge_that_takes_a_step_back_is_not_undone_by_the_next_one(
    sync: dict[str, Any], lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    outer = OuterConfig(optimizer="sgd", lr=lr)
    run = LocalRun(config(outer=outer), ["a"])
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = token_batches(0, batch=32)
    with EditWorker(model, optimizer, run.collective("a"), worker_config(codec="fp32", outer=outer, **sync)) as worker:
        for _ in range(6 * sync["every"]):
            train_step(model, optimizer, next(batches))
        assert worker.outer_step >= 4 and not caplog.text
