"""Loss and speed of a peer's last inner steps, and how long they took it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median

from torch import Tensor

__all__ = ["Speed", "Stopwatch"]

WINDOW = 20  # inner steps


class Speed:
    """The mean of the finite losses and the median seconds of the last WINDOW inner steps."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens: deque[int] = deque(maxlen=WINDOW)
        self._unread: Tensor | None = None
        self._uncounted = 0

    def add_loss(self, loss: float | Tensor) -> None:
        """Add the loss of one inner step. A tensor is read with the next one, so that nothing waits for the device now."""
        if self._unread is not None:
            self._losses.append(float(self._unread))
        self._unread = loss.detach() if isinstance(loss, Tensor) else None
        if not isinstance(loss, Tensor):
            self._losses.append(float(loss))

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens of the inner step now taken."""
        self._uncounted += tokens

    def add_step(self, seconds: float | None) -> None:
        """An inner step was taken. seconds: that it took; None: not known."""
        self._tokens.append(self._uncounted)
        self._uncounted = 0
        if seconds is not None:
            self._seconds.append(seconds)

    @property
    def loss(self) -> float:
        """NaN when none is finite."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def step_s(self) -> float:
        """Seconds per inner step; 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the whole replica; 0 before the first step."""
        return fmean(self._tokens) / self.step_s if self._tokens and self.step_s > 0 else 0.0


class Stopwatch:
    """Seconds from lap to lap, without those in `paused`. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._paused_s = 0.0

    def lap(self) -> float | None:
        """Return the seconds since the last lap; None for the first."""
        now, begun, paused_s = self._clock(), self._begun, self._paused_s
        self._begun, self._paused_s = now, 0.0
        return None if begun is None else now - begun - paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done inside."""
        begun = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - begun
