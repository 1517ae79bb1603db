"""Notices steps that undo merges: an optimizer writes its own copy of the parameters, such as fp32 master weights.

What entering the run or a merge changed in the parameters is compared with what the next inner step changed, and that with the
step after it: where a merge takes one step back (a small outer learning rate, progress that is dropped), an ordinary step goes
there again. A few hundred values of each fragment are looked at, and only until one merge has clearly outlasted a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from edit.errors import ConfigError
from edit.replica.replica import Replica

__all__ = ["UndoneMerges"]

_SAMPLED: Final = 256  # values of a fragment, at most about so many
_EVERY = 1024  # at most one value of so many, so that hardly any memory is taken
_FEWEST: Final = 32  # values: of fewer a step may well be the opposite of a merge by chance
_UNDONE: Final = 3  # merges, one after the other
_LONGER: Final = 2.0  # than an ordinary step is one that undoes a merge, at least
_LOOKS: Final = 32  # a merge that is smaller than a step shows nothing


class UndoneMerges:
    """The watch of one replica: call `before_step`, step the optimizers, call `after_step`.

    It only reads. The ranks of a replica call it together. optimizers: of the model, for the message.
    """

    def __init__(self, replica: Replica, optimizers: Iterable[Optimizer]) -> None:
        self._replica = replica
        self._optimizers = optimizers
        # By fragment, of those that were written since the last step: the values before, and as the next step found them.
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        # By fragment, of those that one step has followed: the values after it, and the products of merge and step.
        self._settled: dict[int, tuple[Tensor, Tensor]] = {}
        self._ended, self._stepped = False, False  # an inner step; one after what was written
        self._products: Tensor | None = None  # of the merge that two steps followed last, see `_look`
        self._unknown = False  # whether a merge was followed by one step only
        self._undone, self._looks = 0, _LOOKS
        replica.on_write = self._note

    def before_step(self) -> None:
        """An optimizer is about to step. Raises ConfigError, at every rank, when a step undid each of the last three merges."""
        if not self._looks or (self._replica.transfers.pinned and torch.cuda.is_current_stream_capturing()):
            return
        if self._ended:  # not before each of several optimizers: the ranks wait for each other
            self._look()
            if self._products is not None:  # at every rank, or at none
                of_ranks = self._replica.layout.ranks.collect(self._products.tolist())
                self._judge(*(sum(values) for values in zip(*of_ranks, strict=True)))
            elif self._unknown:
                self._looks -= 1
            self._ended, self._products, self._unknown = False, None, False
        if not self._looks:
            self._replica.on_write, self._before, self._after, self._settled = None, {}, {}, {}
            return
        for i in self._before.keys() - self._after.keys():
            self._after[i] = self._sample(i)

    def after_step(self) -> None:
        """The last of the optimizers has stepped."""
        self._ended, self._stepped = True, bool(self._after or self._settled)

    def _note(self, i: int) -> None:
        """Fragment i of the local parameters is about to be written."""
        self._look()
        self._after.pop(i, None)
        self._unknown |= self._settled.pop(i, None) is not None
        if i not in self._before and not self._replica.schema.fragments[i].buffers:
            self._before[i] = self._sample(i)

    def _look(self) -> None:
        """If a step followed: compute how many values were looked at, the products of merge and step with each other and with
        themselves, and, once another step has followed, of that with itself."""
        if not self._stepped:
            return
        for i, (settled, products) in self._settled.items():
            ordinary = self._sample(i) - settled
            found = torch.cat((products, ordinary.dot(ordinary).reshape(1)))
            self._products = found if self._products is None else self._products + found
        self._settled = {}
        for i, after in self._after.items():
            now = self._sample(i)
            merged, stepped = after - self._before[i], now - after
            values = torch.tensor(float(len(after)), dtype=torch.float64, device="cpu")
            products = torch.stack((values, merged.dot(stepped), merged.dot(merged), stepped.dot(stepped)))
            self._settled[i] = now, products
        self._before, self._after, self._stepped = {}, {}, False

    def _judge(self, values: float, product: float, merged: float, stepped: float, ordinary: float) -> None:
        if values < _FEWEST or not merged * stepped > 0.0:
            return
        self._looks -= 1
        if -product > 0.9 * sqrt(merged * stepped) and 0.7 < -product / merged < 1.3:
            if stepped < _LONGER**2 * ordinary:
                return
            self._undone += 1
            if self._undone == _UNDONE:
                names = " or ".join(sorted({type(each).__name__ for each in self._optimizers}))
                raise ConfigError(
                    f"each of the last {_UNDONE} merges was undone by the next optimizer step: {names} writes a copy of the "
                    "parameters that it made before, such as fp32 master weights, so this peer trains alone; keep the model in "
                    "fp32 and train under autocast, or give an optimizer that keeps no copy"
                )
            return
        self._undone = 0
        if merged > stepped:
            self._looks = 0

    def _sample(self, i: int) -> Tensor:
        """Return some values of fragment i as this rank holds it, fp64 on the CPU."""
        held = self._replica.layout.locals(i)
        each = -(-_SAMPLED // max(1, len(held)))
        found = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        with self._replica.transfers.beside():
            for part in held:
                flat = part.detach().reshape(-1)
                every = max(_EVERY, -(-flat.numel() // each))
                found.append(flat[every - 1 :: every].to("cpu", torch.float64))
        return torch.cat(found)
