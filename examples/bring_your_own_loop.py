"""Bring your own loop: two peers, each a plain PyTorch loop, train one model: `python examples/bring_your_own_loop.py`.

The lines marked `# edit` are all that a plain loop needs on top. Here both peers live in one process and take turns step by
step; over a network, only `run.collective(...)` becomes another Collective.
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


def train(name: str, low: float, high: float, run: LocalRun) -> Iterator[nn.Module]:
    """One peer's whole training, a step per `next()`; at the end yields the model with the outer parameters in it."""
    torch.manual_seed(len(name))  # peers may start differently: entering gives them the run's parameters
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
    for turn, (model, other) in enumerate(zip(ada, grace, strict=True), start=1):
        if turn in (1, STEPS - 5, STEPS + 1):
            with torch.no_grad():
                losses = [nn.functional.mse_loss(peer(held_out), targets).item() for peer in (model, other)]
            whose = "outer" if turn > STEPS else "local"
            print(f"after {min(turn, STEPS)} steps, {whose} parameters: ada {losses[0]:.4f}, grace {losses[1]:.4f}")


if __name__ == "__main__":
    main()
