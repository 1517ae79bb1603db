"""Notices steps that undo merges: an optimizer writes its own copy of the parameters, such as fp32 master weights.

What entering the run or a merge changed in the parameters is compared with what the next inner step changed, and that with the
step after it. Where a merge takes one step back (a small outer learning rate, progress that is dropped), an ordinary step goes
there again: so only a step that is much longer than the next one counts. A few hundred values of each fragment are looked at,
and only until one merge has clearly outlasted a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import sqrt
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from edit.replica.replica import Replica

__all__ = ["UndoneMerges"]

_log = logging.getLogger(__name__)
_SAMPLED: Final = 256  # values of a fragment, at most about so many
_EVERY = 1024  # at most one value of so many, so that hardly any memory is taken
_FEWEST: Final = 32  # values: of fewer a step may well be the opposite of a merge by chance
_UNDONE: Final = 3  # merges, one after the other
_LONGER: Final = 3.0  # than the next step is one that undoes a merge, at least
_LOOKS: Final = 32  # a merge that is not longer than a step shows nothing


class UndoneMerges:
    """The watch of one rank's part of a replica: call `before_step`, step the optimizers, call `after_step`.

    It reads, and warns once when each of the last three merges was undone. optimizers: of the model, for the warning.
    """

    def __init__(self, replica: Replica, optimizers: Iterable[Optimizer]) -> None:
        self._replica = replica
        self._optimizers = optimizers
        # By fragment, of those that were written since the last step: the values before, and as the next step found them.
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        # By fragment, of those that one step has followed: the values after it, and the products of merge and step.
        self._settled: dict[int, tuple[Tensor, list[float]]] = {}
        self._stepped = False
        self._undone, self._looks = 0, _LOOKS
        replica.on_write = self._note

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if not self._looks or (self._replica.transfers.pinned and torch.cuda.is_current_stream_capturing()):
            return
        self._look()
        if not self._looks:
            self._replica.on_write, self._before, self._after, self._settled = None, {}, {}, {}
            return
        for i in self._before.keys() - self._after.keys():
            self._after[i] = self._sample(i)

    def after_step(self) -> None:
        """The last of the optimizers has stepped."""
        self._stepped = bool(self._after or self._settled)

    def _note(self, i: int) -> None:
        """Fragment i of the local parameters is about to be written."""
        self._look()
        self._after.pop(i, None)
        self._settled.pop(i, None)
        if i not in self._before and not self._replica.schema.fragments[i].buffers:
            self._before[i] = self._sample(i)

    def _look(self) -> None:
        """If a step followed: judge the merges that two have followed by now, and keep how long the first was of the others."""
        if not self._stepped:
            return
        judged = [[*products, _squared(self._sample(i) - then)] for i, (then, products) in self._settled.items()]
        self._settled = {}
        for i, after in self._after.items():
            now, merged = self._sample(i), after - self._before[i]
            step = now - after
            self._settled[i] = now, [len(after), float(merged.dot(step)), _squared(merged), _squared(step)]
        self._before, self._after, self._stepped = {}, {}, False
        if judged:
            self._judge(*(sum(values) for values in zip(*judged, strict=True)))

    def _judge(self, values: float, product: float, merged: float, stepped: float, ordinary: float) -> None:
        """values: how many; then products of merge and step, and of merge, step and the next step with themselves."""
        if values < _FEWEST or not merged * stepped > 0.0:
            return
        self._looks -= 1
        if -product > 0.9 * sqrt(merged * stepped) and 0.7 < -product / merged < 1.3:
            self._undone += stepped > _LONGER**2 * ordinary
            if self._undone == _UNDONE:
                self._looks = 0
                _log.warning(
                    "each of the last %d merges was undone by the next optimizer step: if %s writes a copy of the parameters "
                    "that it made before, such as fp32 master weights, this peer trains alone; keep the model in fp32 and "
                    "train under autocast, or give an optimizer that keeps no copy",
                    _UNDONE,
                    " or ".join(sorted({type(each).__name__ for each in self._optimizers})),
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


def _squared(vector: Tensor) -> float:
    return float(vector.dot(vector))
