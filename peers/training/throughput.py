"""Loss and speed of the last inner steps, as heartbeats and log lines report them.

Owns: the window, and how long a throttled peer idles. Must not know: clocks, training, who reads the numbers.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

from peers.training.trainer import StepResult

__all__ = ["Pace"]

WINDOW = 20


class Pace:
    """throttle: how many times longer a step shall take. Waits for exchanges and throttling do not count as speed."""

    def __init__(self, throttle: float) -> None:
        self._throttle = throttle
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens = 0

    def add(self, result: StepResult) -> None:
        """One more step."""
        self._losses.append(result.loss)
        self._seconds.append(result.seconds)
        self._tokens = result.tokens

    @property
    def loss(self) -> float:
        """Mean of the losses that are finite; NaN when none is."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def rest_s(self) -> float:
        """How long to idle after a step so that it takes `throttle` times as long."""
        return (self._throttle - 1) * median(self._seconds)

    @property
    def step_s(self) -> float:
        """Seconds of a step, throttle included; 0 before the first."""
        return self._throttle * median(self._seconds) if self._seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the whole replica; 0 before the first step."""
        return self._tokens / self.step_s if self.step_s > 0 else 0.0
