"""Train a head on a frozen base together: only the head is exchanged. `python examples/frozen_base.py`.

The base is the same at every peer and never moves; `requires_grad_(False)` is all that says so. Two peers live in one process
and take turns step by step; over a network, `run.collective(...)` becomes what `peers.connect(home)` gives. The lines marked
`# edit` are all that the plain loop needs on top.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from edit import EditWorker, LocalRun, OuterConfig, RunConfig, SyncConfig, WorkerConfig  # edit

STEPS, BATCH = 300, 16


def data(low: float, high: float, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sine on [low, high]: each peer sees only its own half of the curve."""
    inputs = low + (high - low) * torch.rand(size, 1, generator=torch.Generator().manual_seed(seed))
    return inputs, torch.sin(inputs)


def network() -> nn.Sequential:
    """Random features, frozen, equal at all peers (here from a seed, else from a file), and a head to train."""
    torch.manual_seed(0)
    base, head = nn.Sequential(nn.Linear(1, 64), nn.Tanh()), nn.Linear(64, 1)
    return nn.Sequential(base.requires_grad_(False), head)


def train(name: str, low: float, high: float, run: LocalRun) -> Iterator[nn.Module]:
    """One peer's whole training, a step per `next()`; at the end yields the model with the outer parameters in it."""
    model = network()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with EditWorker(model, optimizer, run.collective(name), WorkerConfig(sync=SyncConfig(every=10))):  # edit
        for step in range(STEPS):
            inputs, targets = data(low, high, BATCH, seed=step)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield model
    yield model  # it holds the outer parameters now


def main() -> None:
    """Train both peers in turn and evaluate the outer parameters on the whole curve."""
    run = LocalRun(RunConfig(outer=OuterConfig(lr=0.7, momentum=0.6)), peers=["ada", "grace"])  # edit
    held_out, targets = data(-math.pi, math.pi, 500, seed=-1)
    ada, grace = train("ada", -math.pi, 0, run), train("grace", 0, math.pi, run)
    for turn, models in enumerate(zip(ada, grace, strict=True), start=1):
        if turn in (1, STEPS + 1):
            with torch.no_grad():
                losses = [nn.functional.mse_loss(peer(held_out), targets).item() for peer in models]
            print(f"after {min(turn, STEPS)} steps: ada {losses[0]:.4f}, grace {losses[1]:.4f}")
    everything = sum(parameter.numel() for parameter in models[0].parameters())
    print(f"exchanged {run.state.schema.numel} of {everything} parameters")


if __name__ == "__main__":
    main()
