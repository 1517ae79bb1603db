"""What differential privacy has cost: epsilon at a given delta, of noise that was added so many times.

`edit.config.gaussian` is exact, for sums in which all take part, and needs nothing; `Accountant` composes steps on sampled
examples by the privacy loss distribution of dp-accounting (the extra `dp`), which is imported when the first one is made. A
figure errs upwards only. Source: Koskela et al. 2020 (arXiv 1906.03049) for the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from edit.config.gaussian import composed_multiplier, gaussian_epsilon
from edit.errors import ConfigError

__all__ = ["Accountant", "Spent", "most_steps", "spent_epsilon"]

# The width of a bin of the privacy loss. 0.001 takes 0.3 s for 10,000 steps; 0.0001 gives at most 0.05 less and takes 5 times
# as long.
_INTERVAL = 1e-3
MOST_STEPS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Noise of one kind that was added `count` times."""

    # "poisson": a step on examples that were each drawn with probability `rate`; "shuffle": a pass over all; "all": an attempt
    # at an outer step, in which every organisation may take part.
    sampling: str
    rate: float  # 1 with "shuffle" and "all"
    noise_multiplier: float  # the noise's standard deviation over the clipping norm
    count: int  # steps, passes or attempts


class Accountant:
    """Turns what was spent into epsilon. Raises ConfigError where dp-accounting is not installed."""

    def __init__(self, delta: float) -> None:
        try:
            import dp_accounting.pld.privacy_loss_distribution as privacy_loss_distribution
        except ImportError as error:
            needs = f"needs dp-accounting ({error}): pip install 'edit-localsgd[dp]'"
            raise ConfigError(f'privacy.level = "example" {needs}') from None
        self.delta = delta
        self._pld: Any = privacy_loss_distribution
        self._steps: dict[tuple[float, float], Any] = {}  # the loss of one step, by rate and noise

    def epsilon(self, spent: Collection[Spent]) -> float:
        """Return epsilon of all of it together; 0 of nothing, infinity where it is above what can be computed."""
        counted = [each for each in spent if each.count]
        if not counted:
            return 0.0
        if any(each.noise_multiplier == 0 for each in counted):
            return math.inf
        loss = self._pld.identity(value_discretization_interval=_INTERVAL)
        for each in counted:
            loss = loss.compose(self._loss(each))
        return float(loss.get_epsilon_for_delta(self.delta))

    def _loss(self, spent: Spent) -> Any:
        """Return the privacy loss of all `count` together."""
        if spent.sampling != "poisson":
            return self._gaussian(spent.noise_multiplier / math.sqrt(spent.count))
        kind = spent.rate, spent.noise_multiplier
        if kind not in self._steps:
            self._steps[kind] = self._gaussian(spent.noise_multiplier, sampling_prob=spent.rate)
        return self._steps[kind].self_compose(spent.count)

    def _gaussian(self, noise_multiplier: float, **sampling: float) -> Any:
        return self._pld.from_gaussian_mechanism(noise_multiplier, value_discretization_interval=_INTERVAL, **sampling)


def most_steps(epsilon: Callable[[int], float], most: float, planned: int) -> int:
    """Return how many of `planned` steps may be taken so that epsilon(steps), which grows, is at most `most`.

    It is asked about log2(planned) times, and never for more than 8 times the steps that are allowed: what is far above
    takes long to compute, and much memory.
    """
    low, high = 0, 1  # epsilon(low) is at most `most` or low is 0
    while low < planned and epsilon(high := min(high, planned)) <= most:
        low, high = high, 8 * high
    if low >= planned:
        return max(planned, 0)
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon(middle) <= most:
            low = middle
        else:
            high = middle
    return low


def spent_epsilon(spent: Collection[Spent], delta: float) -> float:
    """Return the exact epsilon of sums of all, of sampling "all" or "shuffle", together; 0 of nothing."""
    multiplier = composed_multiplier((each.noise_multiplier, each.count) for each in spent)
    return gaussian_epsilon(delta, 1, multiplier)
