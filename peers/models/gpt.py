"""The built-in model: a small GPT over bytes (or any tokens below `vocabulary`), in plain PyTorch.

Pre-norm blocks, rotary positions (RoFormer, arXiv 2104.09864), squared ReLU (Primer, arXiv 2109.08668), no biases, head tied to
the embedding: the best validation loss per second on one CPU thread among the alternatives listed below.

Shapes: B sequences, T tokens each (T <= context), C = width, N heads, D = C / N channels per head, V = vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from edit.config.run import ModelConfig
from edit.errors import ConfigError

__all__ = ["GPT"]

# Held-out loss after 300 steps of 512 bytes and ms per step on one thread (4 layers, width 128, context 128; one seed each).
# At lr 2e-3: learned positions, GELU, std 0.02, own head 2.689 (46 ms); rotary 2.469 (52 ms); squared ReLU 2.382.
# At lr 3e-3: std 0.06 2.310; base 1000 2.301; tied head 2.254 (std 0.088 2.317); at 600 steps own 2.088, tied 2.063.
# Per step, RMSNorm, tanh GELU and attention without the fused kernel cost 4 to 6 ms more than LayerNorm, exact GELU and SDPA.
_INIT_GAIN = 0.68  # std = gain / sqrt(width): 0.06 at width 128
_ROTARY_BASE = 1000.0


def rotary_table(context: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's rotation angles, each (context, 1, 1, channels / 2)."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)[:, None, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each channel pair (i, i + D/2) by its position's angle. x: (B, T, ..., D); cos, sin: (T, 1, 1, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, all heads in one product; with tensor parallelism, this rank's heads.

    The rows of `qkv` are ordered by head, then query, key, value, so that a shard of the rows is a shard of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.channels = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, C); cos, sin: (T, 1, 1, D/2) -> (B, T, C)."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, 3, self.channels)
        q, k = rotate(qkv[:, :, :, :2], cos, sin).to(qkv.dtype).unbind(3)  # each (B, T, N, D)
        q, k, v = (part.transpose(1, 2) for part in (q, k, qkv[:, :, :, 2]))  # each (B, N, T, D)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))
        return mixed


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the mlp four times as wide with relu(x)^2 between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, C); cos, sin: (T, 1, 1, D/2) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: Tensor = x + self.down(functional.relu(self.up(self.mlp_norm(x))).square())
        return y


class GPT(nn.Module):
    """Token ids in, next-token loss or logits out. Fragments: embedding, blocks.0 .. blocks.(layers-1), norm.

    seed: fixes the initial values and leaves the process's random state as it was; None: they are whatever lies in memory, for
    who will replace them all. Raises ConfigError for an odd head size.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int | None) -> None:
        super().__init__()
        channels = config.width // config.heads
        if channels % 2:
            raise ConfigError(f"model.width = {config.width}: width / heads = {channels} must be even (rotary positions)")
        self.heads = config.heads
        self.head: nn.Linear | None = None  # see `make_head_a_layer`
        self.context = config.context
        self.vocabulary = config.vocabulary
        with torch.device("meta"):  # no random draw here; `_initialise` makes every value
            # made from what is there: its own initialisation imports half a second's worth of torch when it is on "meta"
            self.embedding = nn.Embedding(config.vocabulary, config.width, _weight=torch.empty(config.vocabulary, config.width))
            self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width, bias=False)
        self.to_empty(device="cpu")
        if seed is not None:
            self._initialise(seed)
        cos, sin = rotary_table(config.context, channels)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _initialise(self, seed: int) -> None:
        """Norms 1; matrices normal; projections into the residual stream scaled by 1 / sqrt(2 layers) (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        std = _INIT_GAIN / math.sqrt(self.embedding.embedding_dim)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
                continue
            residual = name.endswith(("out.weight", "down.weight"))
            scale = 1 / math.sqrt(2 * len(self.blocks)) if residual else 1.0
            nn.init.normal_(parameter, std=std * scale, generator=generator)

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) int64, T <= context -> (B, T, V)."""
        T = tokens.shape[1]
        if self.context < T:
            raise ValueError(f"{T} tokens do not fit in a context of {self.context}")
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        if self.head is not None:
            of_layer: Tensor = self.head(self.norm(x))
            return of_layer
        head = self.embedding.weight
        return functional.linear(self.norm(x), head.to_local() if isinstance(head, DTensor) else head)

    def make_head_a_layer(self) -> None:
        """Multiply by the head in a layer that shares the embedding's weight, so that a layer's hooks see its gradient.

        Names, shapes and values of the parameters stay the same.
        """
        weight = self.embedding.weight
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.head.weight = weight

    def tensor_parallel_plan(self, ranks: int) -> dict[str, ParallelStyle]:
        """How `parallelize_module` splits each block over `ranks`: heads and the mlp's width; norms and embedding stay whole.

        Raises ConfigError when the heads cannot be split evenly.
        """
        if self.heads % ranks:
            raise ConfigError(f"--tensor-parallel {ranks}: does not divide the {self.heads} heads of the model")
        columns, rows = ("attention.qkv", "up"), ("attention.out", "down")
        return {f"blocks.*.{name}": ColwiseParallel() for name in columns} | {
            f"blocks.*.{name}": RowwiseParallel() for name in rows
        }

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: (B, T) int64 -> mean loss in nats, a scalar; without targets the logits (B, T, V)."""
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
