"""Outer optimizers: s = step(D), theta <- theta - s, for SGD, Nesterov (also delayed), CO2's, Adam and Yogi, and plug-ins.

Every operation is a separate, correctly rounded multiplication, addition, division or square root (no fma, no lerp, no alpha=),
so s has the same bits on every CPU.

D has the sign of a gradient (outer minus local), so Adam and Yogi subtract where Reddi et al. 2021 (arXiv 2003.00295,
algorithm 2), whose delta is local minus outer, add. As there, no bias correction, and the second moment starts from eps ** 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from edit import plugins
from edit.config.run import OuterConfig
from edit.errors import PluginError

__all__ = ["OuterOptimizer", "Slots", "outer_optimizer"]

# One fragment's optimizer state by name: flat fp32 vectors as long as the fragment, or of one number.
Slots = Mapping[str, Tensor]


class OuterOptimizer(Protocol):
    """One outer optimizer. It has no state of its own: all of it is in the slots, and the same arguments give the same bits."""

    @property
    def bounded(self) -> bool:
        """Whether lr and eps bound its step, see `edit.merging.outer_state`."""
        ...

    def slots(self, numel: int) -> dict[str, Tensor]:
        """Return a fragment's optimizer state before its first step: fp32, each of shape [numel] or [1], by name."""
        ...

    def step(self, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (s, new state) for the merged pseudo-gradient D; theta <- theta - s. Pure: neither argument changes.

        merged, s: flat fp32, any consecutive piece of a fragment; slots of numel elements are that piece of them, so it goes
        element by element. A slot of one number is the same for all pieces.
        """
        ...


def outer_optimizer(config: OuterConfig) -> OuterOptimizer:
    """Return the optimizer that is chosen. Raises ConfigError for a plug-in that is not admitted, PluginError."""
    plugin, made = plugins.make("outer", config.optimizer, config)
    own: OuterOptimizer = made if plugin.built_in else _OfPlugin(plugin, made)
    return own


Rule = Callable[[OuterConfig, Slots, Tensor], tuple[Tensor, dict[str, Tensor]]]


def _built_in(name: str) -> Callable[[Rule], Rule]:
    """Register an optimizer of this name that is this rule."""

    def registered(rule: Rule) -> Rule:
        plugins.built_in("outer", name)(lambda config: _BuiltIn(config, rule))
        return rule

    return registered


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    config: OuterConfig
    rule: Rule
    bounded: bool = True

    def slots(self, numel: int) -> dict[str, Tensor]:
        """See `OuterOptimizer.slots`."""
        return _initial_slots(self.config, numel)

    def step(self, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `OuterOptimizer.step`."""
        return self.rule(self.config, slots, merged)


@dataclass(frozen=True, slots=True)
class _OfPlugin:
    """A plug-in's optimizer, which is believed nothing: whatever it returns is checked."""

    plugin: plugins.Plugin
    made: Any
    bounded: bool = False

    def slots(self, numel: int) -> dict[str, Tensor]:
        """See `OuterOptimizer.slots`."""
        with plugins.blame(self.plugin):
            slots = self.made.slots(numel)
        if not isinstance(slots, dict) or not all(isinstance(name, str) and name.isidentifier() for name in slots):
            raise PluginError(f"{self.plugin}: slots() must be a dict of tensors by name, not {slots!r:.80}")
        for name, slot in slots.items():
            _check(self.plugin, f"slots()[{name!r}]", slot, (numel, 1))
        return slots

    def step(self, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `OuterOptimizer.step`. Raises PluginError."""
        with plugins.blame(self.plugin):
            step, after = self.made.step({name: slot.clone() for name, slot in slots.items()}, merged.clone())
        _check(self.plugin, "step()", step, (merged.numel(),))
        if not isinstance(after, dict) or after.keys() != slots.keys():
            raise PluginError(f"{self.plugin}: step() must return the slots {sorted(slots)}, not {after!r:.80}")
        for name, slot in after.items():
            _check(self.plugin, f"step()'s slot {name!r}", slot, (slots[name].numel(),))
        return step, after


def _check(plugin: plugins.Plugin, what: str, tensor: object, numels: tuple[int, ...]) -> None:
    """Raise PluginError unless it is a flat fp32 tensor on the CPU, of one of these sizes and finite."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.ndim != 1 or tensor.numel() not in numels:
        found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise PluginError(f"{plugin}: {what} must be torch.float32 [{' or '.join(map(str, numels))}], not {found}")
    if tensor.device.type == "cpu" and not bool(tensor.isfinite().all()):
        raise PluginError(f"{plugin}: {what} is not finite")


def _initial_slots(config: OuterConfig, numel: int) -> dict[str, Tensor]:
    """momentum for nesterov and co2, also buffer and count for delayed_nesterov, first and second for adam, yogi; sgd: {}."""
    if config.optimizer == "sgd":
        return {}
    if config.optimizer in ("nesterov", "co2"):
        return {"momentum": _full(numel)}
    if config.optimizer == "delayed_nesterov":
        return {"momentum": _full(numel), "buffer": _full(numel), "count": _full(1)}
    return {"first": _full(numel), "second": _full(numel, config.eps * config.eps)}


def _full(numel: int, value: float = 0.0) -> Tensor:
    return torch.full((numel,), value, dtype=torch.float32, device="cpu")


@_built_in("sgd")
def _sgd(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """s = nu D."""
    return torch.mul(merged, config.lr), {}


@_built_in("nesterov")
def _nesterov(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """v <- mu v + D; s = nu (D + mu v) (arXiv 2311.08105, algorithm 1)."""
    momentum = torch.mul(slots["momentum"], config.momentum).add_(merged)
    return torch.mul(momentum, config.momentum).add_(merged).mul_(config.lr), {"momentum": momentum}


@_built_in("co2")
def _co2(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """v <- clip(mu v + D / gap_penalty), element by element; s = nu v (arXiv 2401.16265, and its authors' code)."""
    momentum = torch.mul(slots["momentum"], config.momentum).add_(torch.mul(merged, 1 / config.gap_penalty))
    if config.momentum_clip > 0:
        momentum.clamp_(-config.momentum_clip, config.momentum_clip)
    return torch.mul(momentum, config.lr), {"momentum": momentum}


@_built_in("delayed_nesterov")
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


@_built_in("adam")
def _adam(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """m <- b1 m + (1 - b1) D; v <- b2 v + (1 - b2) D^2; s = nu m / (sqrt(v) + eps)."""
    square = torch.mul(merged, merged).mul_(1 - config.beta2)
    return _adaptive(config, slots, merged, torch.mul(slots["second"], config.beta2).add_(square))


@_built_in("yogi")
def _yogi(config: OuterConfig, slots: Slots, merged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As Adam, with v <- v - (1 - b2) D^2 sign(v - D^2)."""
    square = torch.mul(merged, merged)
    change = torch.sub(slots["second"], square).sign_().mul_(square).mul_(1 - config.beta2)
    return _adaptive(config, slots, merged, torch.sub(slots["second"], change))


def _adaptive(config: OuterConfig, slots: Slots, merged: Tensor, second: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    first = torch.mul(slots["first"], config.beta1).add_(torch.mul(merged, 1 - config.beta1))
    step = torch.mul(first, config.lr).div_(torch.sqrt(second).add_(config.eps))
    return step, {"first": first, "second": second}
