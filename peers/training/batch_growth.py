"""A batch size that grows by a local norm test: each peer's own decision, from its own gradients.

With k micro-batches in an inner step, g_1 the gradient of the first one and g the mean of all,

    variance of g = (|g_1|^2 - |g|^2) / (k - 1)

on average: |g_1|^2 is then |E g|^2 and the variance of one micro-batch, |g|^2 is |E g|^2 and a k-th of that (the two norms of
McCandlish et al. 2018, arXiv 1812.06162, appendix A). It costs one more norm for each inner step, and no memory. The norm test
(Byrd et al. 2012, Math. Program. 134; for training with rare exchanges Lau et al. 2024, arXiv 2406.13936) wants

    variance of g <= eta^2 |g|^2

Both sides are means over the last inner steps, whose count falls by a fifth with each exchange since, because one step tells
little; where they say otherwise the batch is doubled, and they begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edit.errors import StorageError

__all__ = ["BatchGrowth", "variance_of_mean"]

_KEPT = 0.8  # of what was added up, at an exchange


def variance_of_mean(first: float, mean: float, count: int) -> float:
    """Return the variance of the mean gradient of `count` >= 2 micro-batches, as far as one inner step tells: without bias.

    first: |g_1|^2 of one micro-batch; mean: |g|^2 of the mean of all. It can be negative.
    """
    return (first - mean) / (count - 1)


class BatchGrowth:
    """How many times the configured batch is trained with.

    most: no more than so many times, at least 2; eta: of the norm test.
    """

    def __init__(self, most: int, eta: float) -> None:
        self.factor = 1
        self._most, self._eta = most, eta
        # Added up over the inner steps, the older ones with less.
        self._variance, self._square = 0.0, 0.0

    @property
    def ratio(self) -> float:
        """The variance of the gradient divided by its square; NaN before any inner step."""
        return self._variance / self._square if self._square > 0 else math.nan

    def observe(self, first_norm: float, norm: float, count: int) -> None:
        """Take the norms of the first micro-batch's gradient and of the mean of all `count`; leave out what is not finite."""
        if math.isfinite(first_norm) and math.isfinite(norm):
            self._variance += variance_of_mean(first_norm**2, norm**2, count)
            self._square += norm**2

    def exchanged(self) -> bool:
        """A contribution has gone out: double the batch if the norm test fails; return whether it was doubled."""
        if 2 * self.factor > self._most or self._variance <= self._eta**2 * self._square:
            self._variance, self._square = _KEPT * self._variance, _KEPT * self._square
            return False
        self.factor *= 2
        self._variance, self._square = 0.0, 0.0
        return True

    def state(self) -> list[float]:
        """Return what a checkpoint holds."""
        return [self.factor, self._variance, self._square]

    def load(self, state: Sequence[float]) -> None:
        """Go on from what `state` gave; with another `most` in the meantime, at most there. Raises StorageError."""
        numbers = isinstance(state, list) and all(type(value) in (int, float) and math.isfinite(value) for value in state)
        if not numbers or len(state) != 3 or state[0] < 1 or math.log2(state[0]) % 1 or state[2] < 0:
            raise StorageError("damaged (scalars.batch is no state of a batch that grows)")
        self.factor = int(state[0])
        while self.factor > self._most:
            self.factor //= 2
        self._variance, self._square = float(state[1]), float(state[2])
