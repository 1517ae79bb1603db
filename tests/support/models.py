"""Small models, data and loops for tests. Every one is deterministic in its seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 11


class Block(nn.Module):
    """Attention-free residual block: enough to have a norm and two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, time, width]
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class TinyTransformer(nn.Module):
    """Token embedding, blocks, norm, head: the layer-wise structure of a real model in about 1000 parameters."""

    def __init__(self, layers: int = 2, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] -> [batch, time, vocabulary]
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def small_mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """4 -> 6 -> 3 with tanh between; fragments `0` and `2`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def regression_batches(seed: int, dtype: torch.dtype = torch.float32, batch: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs [batch, 4], targets [batch, 3]) for `small_mlp`; other seeds are other tasks (non-IID)."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(4, 3, generator=generator)
    while True:
        inputs = torch.randn(batch, 4, generator=generator)
        yield inputs.to(dtype), (inputs @ teacher).to(dtype)


def token_batches(seed: int, batch: int = 4, length: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens [batch, length], next tokens) for `TinyTransformer`: counting upwards in steps of the seed's parity."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
        tokens = (start + (1 + seed % 2) * torch.arange(length + 1)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One plain optimizer step; cross-entropy for integer targets, else mean squares. Returns the loss."""
    inputs, targets = batch
    optimizer.zero_grad()
    outputs = model(inputs)
    if targets.dtype == torch.int64:
        loss = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    else:
        loss = functional.mse_loss(outputs, targets)
    loss.backward()
    optimizer.step()
    return float(loss.detach())
