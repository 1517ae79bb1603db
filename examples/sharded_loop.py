"""A sharded replica in a plain loop: FSDP2 on two ranks trains with a peer of one rank. `python examples/sharded_loop.py`.

That rehearses it on this machine. A peer of a real run, on one rank or on many:
`torchrun --nproc-per-node 8 examples/sharded_loop.py --home FOLDER`, with the folder of `edit-peer join`. The lines marked
`# edit` are all that the plain FSDP2 loop needs on top; every rank exchanges its own shards over its own connection.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rehearsal import rehearse
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import edit  # edit
import peers  # edit

RUN_TOML = """
name = "sharded"
[model]
name = "entry:mine"
[sync]
every = 10
outer_steps = 20
[outer]
lr = 0.7
momentum = 0.6
[rounds]
start_peers = 2
quorum = 2
"""
BATCH, WIDTH = 32, 32


def data(peer_id: str, step: int) -> tuple[Tensor, Tensor]:
    """A sine; each peer sees only its own half of the curve; `all` is the whole, for evaluation."""
    low, high = {"ada": (-torch.pi, 0), "grace": (0, torch.pi)}.get(peer_id, (-torch.pi, torch.pi))
    inputs = low + (high - low) * torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(step))
    return inputs, torch.sin(inputs)


def network() -> nn.Module:
    """Any model; sharded over the ranks when there are several."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), *blocks, nn.Linear(WIDTH, 1))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(home: str, rank: int, ranks: int) -> None:
    """One rank of one peer: each takes its rows of the batch, FSDP2 averages the gradients."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with (
        peers.connect(home) as (collective, run),  # edit
        edit.EditWorker(model, optimizer, collective, edit.WorkerConfig.of(run)),  # edit
    ):
        for step in range(200):
            inputs, targets = (rows[rank::ranks] for rows in data(collective.peer_id, step))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():  # the model holds the outer parameters now
        inputs, targets = data("all", -1)
        loss = nn.functional.mse_loss(model(inputs), targets)
    if rank == 0:
        print(f"{collective.peer_id}, {ranks} rank(s): loss on the whole curve {loss:.4f}", flush=True)


@contextmanager
def world() -> Iterator[tuple[int, int]]:
    """(rank, ranks): what torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def main() -> None:
    """With --home one rank, without it a rehearsal: ada on two ranks, grace on one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home")
    home = parser.parse_args().home
    if home is None:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        rehearse(RUN_TOML, {"ada": (*torchrun, __file__), "grace": (sys.executable, __file__)})
    else:
        with world() as (rank, ranks):
            train(home, rank, ranks)


if __name__ == "__main__":
    main()
