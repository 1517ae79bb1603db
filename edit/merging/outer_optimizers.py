"""Outer optimizers: s = step(D), theta <- theta - s, for SGD, Nesterov (also delayed), Adam and Yogi.

Every operation is a separate, correctly rounded multiplication, addition, division or square root (no fma, no lerp, no alpha=),
so s has the same bits on every CPU.

D has the sign of a gradient (outer minus local), so Adam and Yogi subtract where Reddi et al. 2021 (arXiv 2003.00295,
algorithm 2), whose delta is local minus outer, add. As there, no bias correction, and the second moment starts from eps ** 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from edit.config.run import OuterConfig

__all__ = ["Slots", "initial_slots", "outer_step"]

# One fragment's optimizer state by name: flat fp32 vectors as long as the fragment, or of one number.
Slots = Mapping[str, Tensor]


def initial_slots(config: OuterConfig, numel: int) -> dict[str, Tensor]:
    """Return the optimizer state before the first step.

    {} for sgd, momentum for nesterov, also buffer and count for delayed_nesterov, first and second for adam and yogi.
    """
    if config.optimizer == "sgd":
        return {}
    if config.optimizer == "nesterov":
        return {"momentum": torch.zeros(numel)}
    if config.optimizer == "delayed_nesterov":
        return {"momentum": torch.zeros(numel), "buffer": torch.zeros(numel), "count": torch.zeros(1)}
    return {"first": torch.zeros(numel), "second": torch.full((numel,), config.eps * config.eps)}


def outer_step(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (s, new state) for the merged pseudo-gradient D; theta <- theta - s. Pure: neither argument changes."""
    return _RULES[config.optimizer](config, slots, merged)


def _sgd(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """s = nu D."""
    return torch.mul(merged, config.lr), {}


def _nesterov(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """v <- mu v + D; s = nu (D + mu v) (arXiv 2311.08105, algorithm 1)."""
    momentum = torch.mul(slots["momentum"], config.momentum).add_(merged)
    return torch.mul(momentum, config.momentum).add_(merged).mul_(config.lr), {"momentum": momentum}


def _delayed_nesterov(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """s = nu (c mu v + D/N); each N-th time v <- mu v + sum D/N, then s = nu ((1 - cN + c) mu v + D/N) (arXiv 2401.09135, 3).

    buffer: sum D/N, count: how many are in it. With N = 1 and c = 0 this is Nesterov, to the bit.
    """
    share, momentum, factor = torch.mul(merged, 1 / config.period), slots["momentum"], config.c
    buffer, count = torch.add(slots["buffer"], share), slots["count"] + 1
    if count.item() >= config.period:
        momentum, factor = torch.mul(momentum, config.momentum).add_(buffer), 1 - config.c * config.period + config.c
        buffer, count = torch.zeros_like(buffer), torch.zeros_like(count)
    step = torch.mul(momentum, factor * config.momentum).add_(share).mul_(config.lr)
    return step, {"momentum": momentum, "buffer": buffer, "count": count}


def _adam(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """m <- b1 m + (1 - b1) D; v <- b2 v + (1 - b2) D^2; s = nu m / (sqrt(v) + eps)."""
    square = torch.mul(merged, merged).mul_(1 - config.beta2)
    return _adaptive(config, slots, merged, torch.mul(slots["second"], config.beta2).add_(square))


def _yogi(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As Adam, with v <- v - (1 - b2) D^2 sign(v - D^2)."""
    square = torch.mul(merged, merged)
    change = torch.sub(slots["second"], square).sign_().mul_(square).mul_(1 - config.beta2)
    return _adaptive(config, slots, merged, torch.sub(slots["second"], change))


def _adaptive(config: OuterConfig, slots: Slots, merged: Tensor, second: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    first = torch.mul(slots["first"], config.beta1).add_(torch.mul(merged, 1 - config.beta1))
    step = torch.mul(first, config.lr).div_(torch.sqrt(second).add_(config.eps))
    return step, {"first": first, "second": second}


_RULES: Mapping[str, Callable[[OuterConfig, Slots, Tensor], tuple[Tensor, dict[str, Tensor]]]] = {
    "sgd": _sgd,
    "nesterov": _nesterov,
    "delayed_nesterov": _delayed_nesterov,
    "adam": _adam,
    "yogi": _yogi,
}
