"""`peers.connect` and `EditWorker` with a real coordinator: of which ranks a connection is, and in which process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from aggregator.control.status import run_status
from edit import EditWorker, WorkerConfig
from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from peers.connection import connect
from tests.integration.test_readme import run
from tests.support.ranks import at_every_rank
from tests.support.running import running
from tests.support.served import new_folder

TOML = """
name = "ranks"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = 2
[rounds]
start_peers = 1
quorum = 1
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


def joined(state: Path, home: Path) -> Path:
    invitation = run(["edit-coordinator", "invite", home.name, "--state", str(state)])
    run(["edit-peer", "join", invitation.splitlines()[0], "--home", str(home)])
    return home


def averages_itself(home: Path) -> tuple[str, list[float]]:
    """A loop that averages gradients of its own: what it is told without ranks, and what it has trained with them."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with connect(home) as (collective, config):
        with pytest.raises(ConfigError) as error:
            EditWorker(model, optimizer, collective, WorkerConfig.of(config)).__enter__()
        with EditWorker(model, optimizer, collective, WorkerConfig.of(config), Ranks.world()) as worker:
            while not worker.finished:
                model(torch.full((1, 3), float(torch.distributed.get_rank()))).sum().backward()
                torch.distributed.all_reduce(model.weight.grad)
                optimizer.step()
                optimizer.zero_grad()
    return str(error.value), model.weight.flatten().tolist()


def test_a_worker_of_one_rank_is_refused_where_all_ranks_are_connected_as_one_peer(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder) as coordinator:
        told = at_every_rank(averages_itself, 2, tmp_path, joined(folder.path, tmp_path / "a"))
        coordinator.await_(lambda at: run_status(at).outer_step == 2)
    assert told[0] == told[1]
    message, trained = told[0]
    assert "made for 2 ranks of one peer, this EditWorker for 1: give it the model in its DistributedDataParallel" in message
    assert all(value < 0 for value in trained)
