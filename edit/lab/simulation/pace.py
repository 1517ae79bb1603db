"""How fast one simulated peer computes: its own speed, the spread of its phases, slowdowns at random."""

from __future__ import annotations

import math
from random import Random

from edit.lab.simulation.scenario import Compute

__all__ = ["Pace"]


class Pace:
    """One peer's speed. step_s: seconds per inner step when nothing slows it down. Ask with times that never go back."""

    __slots__ = ("_changes_at", "_config", "_random", "_stalled", "step_s")

    def __init__(self, step_s: float, config: Compute, random: Random) -> None:
        self.step_s = step_s
        self._config = config
        self._random = random
        self._stalled = False
        self._changes_at = self._draw_change(0.0)

    def finish(self, steps: int, now: float) -> float:
        """Return when `steps` inner steps that begin now are done."""
        left = steps * self.step_s
        if self._config.jitter:
            left *= math.exp(self._random.gauss(0.0, self._config.jitter))
        if self._changes_at == math.inf:
            return now + left
        self._pass(now)
        while (end := now + left * self._factor) > self._changes_at:
            left -= (self._changes_at - now) / self._factor
            now = self._changes_at
            self._change()
        return end

    @property
    def _factor(self) -> float:
        return self._config.stall_factor if self._stalled else 1.0

    def _pass(self, now: float) -> None:
        while self._changes_at <= now:
            self._change()

    def _change(self) -> None:
        self._stalled = not self._stalled
        self._changes_at = self._draw_change(self._changes_at)

    def _draw_change(self, now: float) -> float:
        if not self._config.stalls_per_hour:
            return math.inf
        mean = self._config.stall_s if self._stalled else 3600.0 / self._config.stalls_per_hour
        return now + self._random.expovariate(1.0 / mean)
