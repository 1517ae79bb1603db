"""`peers.connect` and `EditWorker` with a real coordinator: of which ranks a connection is, and in which process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from aggregator.control.status import run_status
from edit import EditWorker, SyncConfig, WorkerConfig
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
        other = WorkerConfig(sync=SyncConfig(groups=2))
        with pytest.raises(ConfigError, match=r"^sync\.groups = 2: the run has 1; give the EditWorker WorkerConfig\.of"):
            EditWorker(model, optimizer, collective, other, Ranks.world()).__enter__()
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


_FORKS = """
import os, pickle, signal, sys, warnings
from peers.connection import connect
import torch
from edit import ConfigError, EditWorker, WorkerConfig

warnings.simplefilter("ignore")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(collective, config):
    with EditWorker(model, optimizer, collective, WorkerConfig.of(config)) as worker:
        while not worker.finished:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    return worker.outer_step

with connect(sys.argv[1]) as (collective, config):
    try:
        pickle.dumps(collective)
    except TypeError as error:
        print(error, flush=True)
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # a call that would wait for ever
        try:
            train(collective, config)
        except ConfigError as error:
            print(error)
        collective.close()
        sys.stdout.flush()
        os._exit(0)
    print(os.waitpid(pid, 0)[1], train(collective, config))
"""


def test_a_connection_is_of_the_process_that_made_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home = joined(folder.path, tmp_path / "a")
        ended = subprocess.run([sys.executable, "-c", _FORKS, str(home)], stdout=subprocess.PIPE, text=True, check=True)
    remedy = "connect in each rank (start the ranks with torchrun)"
    assert ended.stdout.splitlines() == [
        f"a connection to a run cannot be copied: {remedy}",
        f"the connection to the run was made before this process was forked: {remedy}",
        "0 2",
    ]
