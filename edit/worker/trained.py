"""What the optimizers of a worker train, held against what is exchanged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from edit.errors import ConfigError
from edit.replica.layout import local_of
from edit.replica.ranks import Ranks
from edit.worker.unwrap import wrapped

__all__ = ["ForeignParameters", "refuse_foreign"]

_log = logging.getLogger(__name__)


def refuse_foreign(optimizers: Sequence[Optimizer], exchanged: Sequence[Tensor], ranks: Ranks) -> None:
    """Raise ConfigError, at every rank, where torch's own optimizers hold parameters, but none that is exchanged.

    What lies in the memory of a parameter that is exchanged counts as that. Of other optimizers it cannot be known what they
    move, by copies of the parameters or as they step others: a warning.
    """

    def look() -> None:
        held = [*_held(optimizers)]
        if not held or any(map(_Known(exchanged).has, held)):  # groups may be added later
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
    """What the optimizers train beside what is exchanged, and whether that was said."""

    def __init__(self, optimizers: Sequence[Optimizer], exchanged: Sequence[Tensor]) -> None:
        self._optimizers, self._exchanged = optimizers, exchanged
        self._said: set[int] = set()  # ids

    def warn(self) -> None:
        """Warn once of each; of none where nothing that is exchanged is held, as then they may be copies."""
        held, known = {id(each): each for each in _held(self._optimizers)}, _Known(self._exchanged)
        beside = {key: each for key, each in held.items() if not known.has(each)}
        if len(beside) == len(held):
            return
        beside = {key: each for key, each in beside.items() if each.requires_grad}
        new = [each for key, each in beside.items() if key not in self._said]
        self._said = set(beside)
        if new:
            _log.warning(
                "the optimizer also trains what is not of the model that the EditWorker was given (%d tensors, the first of "
                "shape %s): that is not exchanged, and each peer ends with its own; give it a module that has them all",
                len(new),
                list(new[0].shape),
            )


class _Known:
    """Some parameters, and the memory in which they lie."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        known = tuple(parameters)
        self._ids, self._places = set(map(id, known)), set(map(_place, known)) - {0}

    def has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids or _place(tensor) in self._places


def _place(tensor: Tensor) -> int:
    """Return where the memory begins that holds a tensor's values, or this rank's of them; 0: it has none of its own."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if type(local) in (Tensor, nn.Parameter) else 0


def _held(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yield the parameters in the groups of these optimizers, and of those that they wrap."""
    for optimizer in optimizers:
        inside = wrapped(optimizer)
        for one in (optimizer, inside) if inside is not None else (optimizer,):
            for group in one.param_groups:
                yield from group["params"]
