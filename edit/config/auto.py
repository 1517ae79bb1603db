"""`outer.preset = "auto"`: the outer optimizer from a run's length. docs/outer-settings.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OuterChoice", "choose_outer"]

_MANY = 100  # exchanges of each fragment
_SHORT_H = 16


@dataclass(frozen=True, slots=True)
class OuterChoice:
    """The settings of [outer] that were chosen, and why."""

    optimizer: str
    lr: float
    momentum: float
    why: str


def choose_outer(*, outer_steps: int, groups: int, every: int, peers: int) -> OuterChoice:
    """Return the outer optimizer for so many exchanges of each fragment, outer_steps / groups.

    A large momentum needs many outer steps to pay: Nesterov with 0.7 / 0.6 below 100, then EDiT's 0.8 / 0.85, but 0.7 / 0.6
    where H is at most 16. It is Nesterov's momentum always, so that a run whose length is changed keeps its state. `peers` is
    only named: more may join.
    """
    steps = outer_steps // groups
    run = f"{steps} outer steps of each fragment, H {every}, {peers} {'peer' if peers == 1 else 'peers'}"
    if steps < _MANY:
        return OuterChoice("nesterov", 0.7, 0.6, f"nesterov 0.7 / 0.6: {run}; a large momentum pays from {_MANY} on")
    if every <= _SHORT_H:
        return OuterChoice("nesterov", 0.7, 0.6, f"nesterov 0.7 / 0.6: {run}; a large momentum hurts with H up to {_SHORT_H}")
    return OuterChoice("nesterov", 0.8, 0.85, f"nesterov 0.8 / 0.85: {run}; from {_MANY} on EDiT's settings")
