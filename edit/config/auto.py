"""`outer.preset = "auto"`: the outer optimizer from a run's length. docs/outer-settings.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OuterChoice", "choose_outer"]

_FEW, _MANY = 40, 200  # exchanges of each fragment
_SHORT_H = 16


@dataclass(frozen=True, slots=True)
class OuterChoice:
    """The settings of [outer] that were chosen, and why."""

    optimizer: str
    lr: float
    # None: the optimizer has none.
    momentum: float | None
    why: str


def choose_outer(*, outer_steps: int, groups: int, every: int, peers: int) -> OuterChoice:
    """Return the outer optimizer for so many exchanges of each fragment, outer_steps / groups.

    Momentum needs many outer steps to pay: plain steps below 40, 0.7 / 0.6 below 200, then EDiT's 0.8 / 0.85, but 0.7 / 0.6
    where H is at most 16, because a large momentum hurts there. `peers` is only named: no measurement tells the choice by it.
    """
    steps = outer_steps // groups
    run = f"{steps} outer steps of each fragment, H {every}, {peers} {'peer' if peers == 1 else 'peers'}"
    if steps < _FEW:
        return OuterChoice("sgd", 1.0, None, f"sgd 1.0: {run}; below {_FEW} outer momentum does not pay")
    if steps < _MANY:
        return OuterChoice("nesterov", 0.7, 0.6, f"nesterov 0.7 / 0.6: {run}; from {_FEW} on momentum pays")
    if every <= _SHORT_H:
        return OuterChoice("nesterov", 0.7, 0.6, f"nesterov 0.7 / 0.6: {run}; a large momentum hurts with H up to {_SHORT_H}")
    return OuterChoice("nesterov", 0.8, 0.85, f"nesterov 0.8 / 0.85: {run}; from {_MANY} on EDiT's settings")
