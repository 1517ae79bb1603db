"""Loss and speed of the last inner steps, for heartbeats and the log."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

from peers.training.trainer import StepResult

__all__ = ["Throughput"]

WINDOW = 20  # inner steps


class Throughput:
    """Mean loss and median speed of the last WINDOW inner steps, without waits for exchanges.

    throttle: how many times as long a step shall take.
    """

    def __init__(self, throttle: float) -> None:
        self._throttle = throttle
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens = 0

    def add(self, result: StepResult) -> None:
        """Add one inner step."""
        self._losses.append(result.loss)
        self._seconds.append(result.seconds)
        self._tokens = result.tokens

    @property
    def loss(self) -> float:
        """The mean of the finite losses; NaN when none is finite."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def idle_s(self) -> float:
        """How long to wait after a step so that it takes `throttle` times as long."""
        return (self._throttle - 1) * median(self._seconds)

    @property
    def step_s(self) -> float:
        """Seconds per step, throttle included; 0 before the first."""
        return self._throttle * median(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the whole replica; 0 before the first step."""
        return self._tokens / self.step_s if self.step_s > 0 else 0.0
