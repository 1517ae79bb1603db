"""A Lightning Trainer in a run: `python examples/lightning_trainer.py` rehearses it with two peers on this machine.

`--home FOLDER` is one peer of a real run, in a folder that `edit-peer join` created. The lines marked `# edit` are all that a
plain Trainer needs on top.
"""

import argparse
import math
import sys
import warnings

import lightning.pytorch as lightning
import torch
from rehearsal import rehearse
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import edit  # edit
import peers  # edit
from edit.integrations.lightning import EditCallback  # edit

RUN_TOML = """
name = "lightning"
[model]
name = "entry:mine"
[sync]
every = 20
outer_steps = 10
[outer]
lr = 0.7
momentum = 0.6
[rounds]
start_peers = 2
quorum = 2
"""


def curve(low: float, high: float, size: int) -> DataLoader[tuple[Tensor, ...]]:
    """A sine on [low, high]: each peer sees only its own half of it."""
    inputs = low + (high - low) * torch.rand(size, 1, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, torch.sin(inputs)), batch_size=16)


class Sine(lightning.LightningModule):
    """Any LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(home: str) -> None:
    """One peer: any Lightning Trainer, with one more callback."""
    module = Sine()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with peers.connect(home) as (collective, run):  # edit
        low, high = (-math.pi, 0.0) if collective.peer_id == "ada" else (0.0, math.pi)
        joined = EditCallback(collective, edit.WorkerConfig.of(run), evaluate_outer=True)  # edit
        trainer = lightning.Trainer(max_steps=200, accelerator="cpu", callbacks=[joined], **quiet)
        before = trainer.validate(module, curve(-math.pi, math.pi, 512), verbose=False)[0]["loss"]
        trainer.fit(module, curve(low, high, 640))
        after = trainer.validate(module, curve(-math.pi, math.pi, 512), verbose=False)[0]["loss"]
    print(f"{collective.peer_id}: loss on the whole curve {before:.4f} before, {after:.4f} after", flush=True)


def main() -> None:
    """With --home one peer, without it a rehearsal of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home")
    home = parser.parse_args().home
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    if home is None:
        rehearse(RUN_TOML, dict.fromkeys(("ada", "grace"), (sys.executable, __file__)))
    else:
        train(home)


if __name__ == "__main__":
    main()
