"""DiLoCo and EDiT, naively: the test oracle. One fragment, fp32, plain operations, written from the papers alone.

Owns: the rule in its most readable form. Must not know: the fast code it checks, codecs, carriers. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Edit", "diloco", "nesterov"]


def nesterov(theta: Tensor, momentum: Tensor, merged: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """(theta, momentum) after the outer step 9: v <- mu v + D; theta <- theta - nu (D + mu v)."""
    momentum = mu * momentum + merged
    return theta - lr * (merged + mu * momentum), momentum


def diloco(theta: Tensor, momentum: Tensor, local: Mapping[str, Tensor], lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """One DiLoCo round (arXiv 2311.08105): the plain mean of the peers' pseudo-gradients, then Nesterov. local: by peer_id."""
    merged = torch.zeros_like(theta)
    for peer_id in sorted(local):
        merged = merged + (theta - local[peer_id]) * (1 / len(local))
    return nesterov(theta, momentum, merged, lr, mu)


@dataclass
class _History:
    """One peer's norms so far: the moving sums as they come, uncorrected, and how many."""

    mean: float = 0.0
    square: float = 0.0
    count: int = 0


@dataclass
class Edit:
    """EDiT (arXiv 2412.07210) with norm = "raw" and no verdict on idle peers; theta and momentum are replaced by `round`."""

    theta: Tensor
    lr: float = 0.8
    mu: float = 0.85
    alpha: float = 0.02
    delta: float = 3.0
    observations: int = 10
    temperature: float = 1.0
    clip: float = 10.0
    momentum: Tensor = field(default_factory=lambda: torch.zeros(()))
    history: dict[str, _History] = field(default_factory=dict)

    def round(self, local: Mapping[str, Tensor]) -> dict[str, float]:
        """One round from every peer's local parameters; returns the weights (0: bad). All bad: nothing moves."""
        deltas = {peer_id: self.theta - local[peer_id] for peer_id in sorted(local)}
        norms = {peer_id: float(delta.double().square().sum().sqrt()) for peer_id, delta in deltas.items()}
        good = [peer_id for peer_id in deltas if not self._bad(peer_id, norms[peer_id])]
        for peer_id in good:
            self._observe(peer_id, norms[peer_id])
        if not good:
            return dict.fromkeys(deltas, 0.0)
        least = min(norms[peer_id] for peer_id in good)
        parts = {peer_id: math.exp(-(norms[peer_id] - least) / self.temperature) for peer_id in good}
        weights = {peer_id: parts.get(peer_id, 0.0) / sum(parts.values()) for peer_id in deltas}
        merged = torch.zeros_like(self.theta)
        for peer_id in good:
            merged = merged + weights[peer_id] * deltas[peer_id]
        merged = merged * min(1.0, self.clip / (float(merged.double().square().sum().sqrt()) + 1e-6))
        self.theta, self.momentum = nesterov(self.theta, self.momentum, merged, self.lr, self.mu)
        return weights

    def _bad(self, peer_id: str, norm: float) -> bool:
        seen = self.history.setdefault(peer_id, _History())
        if not math.isfinite(norm) or seen.count < self.observations:
            return not math.isfinite(norm)
        correction = 1 - (1 - self.alpha) ** seen.count
        mean = seen.mean / correction
        sigma = max(math.sqrt(seen.square / correction), 1e-3 * mean)  # equal norms: rounding is no anomaly
        return (norm - mean) / sigma > self.delta if sigma > 0 else norm > mean

    def _observe(self, peer_id: str, norm: float) -> None:
        seen = self.history[peer_id]
        seen.count += 1
        seen.mean = self.alpha * norm + (1 - self.alpha) * seen.mean
        deviation = norm - seen.mean / (1 - (1 - self.alpha) ** seen.count)
        seen.square = (1 - self.alpha) * seen.square + self.alpha * deviation**2
