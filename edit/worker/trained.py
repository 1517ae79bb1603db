"""What the optimizers of a worker train, held against what is exchanged."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set

from torch import Tensor
from torch.optim import Optimizer

from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from edit.worker.unwrap import wrapped

__all__ = ["ForeignParameters", "refuse_foreign"]

_log = logging.getLogger(__name__)


def refuse_foreign(optimizers: Sequence[Optimizer], exchanged: Set[int], ranks: Ranks) -> None:
    """Raise ConfigError, at every rank, where torch's own optimizers hold parameters, but none that is exchanged.

    exchanged: ids. Of other optimizers it cannot be known what they move, by copies of the parameters or as they step others:
    a warning.
    """

    def look() -> None:
        held = [*_held(optimizers)]
        if not held or any(id(each) in exchanged for each in held):  # groups may be added later
            return
        names = ", ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
        remedy = "make it of the trainable parameters of the model that is given, once that is copied, moved and sharded"
        if all(f"{type(one).__module__}.".startswith("torch.optim.") for one in optimizers):
            raise ConfigError(f"optimizer: {names} trains no parameter that is exchanged: {remedy}")
        if ranks.leads:
            _log.warning(
                "%s holds no parameter that is exchanged: if nothing else trains them, this peer contributes nothing; %s",
                names,
                remedy,
            )

    ranks.together(look)


class ForeignParameters:
    """What the optimizers train beside what is exchanged, and whether that was said.

    exchanged: ids.
    """

    def __init__(self, optimizers: Sequence[Optimizer], exchanged: Set[int]) -> None:
        self._optimizers, self._exchanged = optimizers, exchanged
        self._said: set[int] = set()  # ids

    def warn(self) -> None:
        """Warn once of each; of none where nothing that is exchanged is held, as then they may be copies."""
        held = {id(each): each for each in _held(self._optimizers)}
        if held.keys().isdisjoint(self._exchanged):
            return
        beside = {key: each for key, each in held.items() if key not in self._exchanged and each.requires_grad}
        new = [each for key, each in beside.items() if key not in self._said]
        self._said = set(beside)
        if new:
            _log.warning(
                "the optimizer also trains what is not of the model that the EditWorker was given (%d tensors, the first of "
                "shape %s): that is not exchanged, and each peer ends with its own; give it a module that has them all",
                len(new),
                list(new[0].shape),
            )


def _held(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yield the parameters in the groups of these optimizers, and of those that they wrap."""
    for optimizer in optimizers:
        inside = wrapped(optimizer)
        for one in (optimizer, inside) if inside is not None else (optimizer,):
            for group in one.param_groups:
                yield from group["params"]
