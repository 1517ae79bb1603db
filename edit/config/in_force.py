"""What is in force at an outer step: H, the batch, the outer learning rate and momentum.

They are functions of the outer step's number and the settings, so a replay, a member of a swarm and whoever consents to the
configuration know them without being told. Only a batch that may grow (inner.batch_growth) is counted instead: it has no
influence on an outer step beyond the tokens that a contribution is weighted by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edit.config.algorithm import OuterConfig, SyncConfig
from edit.config.run import RunConfig

__all__ = ["InForce", "in_force", "outer_in_force", "rate_factor"]

_WITH_MOMENTUM = ("nesterov", "co2", "delayed_nesterov")


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The values that one outer step is taken with."""

    # H: inner steps between two exchanges of the same fragment.
    every: int
    # Sequences in an inner step of one peer; where it may grow the mean of what was merged; 0: not known.
    batch: int
    # Of the outer optimizer; of a plug-in, what the configuration says.
    lr: float
    # 0: the optimizer has none.
    momentum: float


def in_force(config: RunConfig, outer_step: int, trained: tuple[int, int] = (0, 0)) -> InForce:
    """Return what is in force for the advance from this outer step of a run whose outer.algorithm is "mean".

    trained: inner steps and tokens behind what was merged, added up; (0, 0): not known. Only a batch that may grow follows
            them.
    """
    outer = outer_in_force(config.outer, config.sync, outer_step)
    return InForce(
        every=config.sync.every_at(outer_step),
        batch=_batch(config, *trained),
        lr=outer.lr,
        momentum=outer.momentum if outer.optimizer in _WITH_MOMENTUM else 0.0,
    )


def _batch(config: RunConfig, inner_steps: int, tokens: int) -> int:
    configured = config.inner.batch_size * config.inner.accumulation
    if config.inner.batch_growth == 1:
        return configured
    return round(tokens / (inner_steps * config.model.context)) if inner_steps else 0


def outer_in_force(outer: OuterConfig, sync: SyncConfig, outer_step: int) -> OuterConfig:
    """Return the section [outer] with the learning rate and momentum for the advance from this outer step."""
    if outer_step < outer.mean_steps:
        return replace(outer, lr=1.0, momentum=0.0, mean_steps=0, momentum_warmup=0, momentum_restarts=(), correlation=0.0)
    if outer.momentum_warmup:
        outer = replace(
            outer, momentum=outer.momentum_at(outer_step // sync.groups)
        )  # each group is exchanged once in `groups`
    if outer.correlation and (every := sync.every_at(outer_step)) != (usual := sync.usual_every(outer.mean_steps)):
        outer = replace(outer, lr=outer.lr * rate_factor(outer.momentum, outer.correlation, every / usual))
    return outer


def rate_factor(momentum: float, correlation: float, ratio: float) -> float:
    """Return by what the learning rate of Nesterov momentum is multiplied when H becomes `ratio` times what it was.

    Along what successive pseudo-gradients have in common, an outer step is nu (1 + mu / (1 - mu rho)) times one of them: nu for
    the newest, and nu mu (1 + mu rho + (mu rho)^2 + ...) for it and those before by way of the momentum, where rho is the
    correlation of successive ones. The factor keeps that product as it is. A pseudo-gradient of H inner steps is taken to be a
    part that all share, which grows with H, and noise, which grows with its square root: so rho / (1 - rho) grows with H.

    Args:
        momentum: mu.
        correlation: rho at the H that nu was chosen for; at least 0, below 1.
        ratio: the present H divided by that one.
    """
    present = correlation * ratio / (correlation * ratio + (1.0 - correlation))
    return (1.0 + momentum / (1.0 - momentum * correlation)) / (1.0 + momentum / (1.0 - momentum * present))
