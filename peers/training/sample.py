"""Text from a byte-level model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edit.errors import ConfigError
from peers.training.data import SEPARATOR

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, *, context: int, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> bytes:
    """Return `length` bytes that continue `prompt`; an empty prompt is the start of a file.

    model(tokens) gives logits (B, T, V); ids above 255 are never drawn. The window grows up to `context`, then slides.
    temperature 0 takes the most likely byte; top_k 0 draws from all. The same seed gives the same bytes on the same machine.

    Raises ConfigError for a negative length, temperature or top_k.
    """
    for name, value in (("length", length), ("temperature", temperature), ("top_k", top_k)):
        if value < 0:
            raise ConfigError(f"{name} = {value}: must not be negative")
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = list(prompt) or [SEPARATOR]
    training = model.training
    model.eval()
    try:
        for _ in range(length):
            window = torch.tensor([tokens[-context:]], device=device)  # (1, T)
            tokens.append(_draw(model(window)[0, -1, :256].float().cpu(), temperature, top_k, generator))
    finally:
        model.train(training)
    return bytes(tokens[len(tokens) - length :])


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one token id. logits: (V,) on the CPU."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator))
