"""What differential privacy has cost: epsilon at a given delta, of noise that was added so many times.

`gaussian_epsilon` is exact and needs nothing; `Accountant` composes steps on sampled examples by the privacy loss distribution
of dp-accounting (the extra `dp`), which is imported when the first one is made. A figure errs upwards only.

Source: Balle and Wang 2018 (arXiv 1805.06530) for the exact form; Koskela et al. 2020 (arXiv 1906.03049) for the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from edit.errors import ConfigError

__all__ = ["Accountant", "Spent", "gaussian_delta", "gaussian_epsilon", "gaussian_multiplier", "most_steps"]

# The width of a bin of the privacy loss. 0.001 takes 0.3 s for 10,000 steps; 0.0001 gives at most 0.05 less and takes 5 times
# as long.
_INTERVAL = 1e-3
MOST_STEPS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Noise of one kind that was added `count` times."""

    sampling: str  # "poisson": a step on examples that were each drawn with probability `rate`; "shuffle": a pass over all
    rate: float  # 1 with "shuffle"
    noise_multiplier: float  # the noise's standard deviation over the clipping norm
    count: int  # steps, or passes


class Accountant:
    """Turns what was spent into epsilon. Raises ConfigError where dp-accounting is not installed."""

    def __init__(self, delta: float) -> None:
        try:
            from dp_accounting import dp_event
            from dp_accounting.pld import PLDAccountant
        except ImportError as error:
            raise ConfigError(
                f'privacy.level = "example" needs dp-accounting ({error}): pip install "edit-localsgd[dp]"'
            ) from None
        self.delta = delta
        self._event: Any = dp_event
        self._pld: Callable[..., Any] = PLDAccountant

    def epsilon(self, spent: Collection[Spent]) -> float:
        """Return epsilon of all of it together; 0 of nothing, infinity where it is above what can be computed."""
        accountant = self._pld(value_discretization_interval=_INTERVAL)
        event = self._event
        for each in spent:
            if each.count == 0:
                continue
            once = event.GaussianDpEvent(each.noise_multiplier)
            if each.sampling == "poisson":
                once = event.PoissonSampledDpEvent(each.rate, once)
            accountant.compose(once, each.count)
        return float(accountant.get_epsilon(self.delta)) if any(each.count for each in spent) else 0.0


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


def gaussian_delta(epsilon: float, steps: int, noise_multiplier: float) -> float:
    """Return delta of `steps` sums with Gaussian noise, at an epsilon: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    mu = sqrt(steps) / noise_multiplier: exact, whatever depends on the sums before.
    """
    if steps == 0:
        return 0.0
    mu = math.sqrt(steps) / noise_multiplier
    first = _log_phi(mu / 2 - epsilon / mu)
    second = epsilon + _log_phi(-mu / 2 - epsilon / mu)
    return max(0.0, math.exp(first) * -math.expm1(min(0.0, second - first)))


def gaussian_epsilon(delta: float, steps: int, noise_multiplier: float) -> float:
    """Return the smallest epsilon, to 1e-9 of it upwards, at which `gaussian_delta` is at most `delta`."""
    if gaussian_delta(0.0, steps, noise_multiplier) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, steps, noise_multiplier) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if gaussian_delta(middle, steps, noise_multiplier) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_multiplier(epsilon: float, delta: float, steps: int) -> float:
    """Return the smallest noise multiplier, to 1e-9 of it upwards, with which so many steps cost at most `epsilon`."""
    low, high = 0.0, 1.0
    while gaussian_delta(epsilon, steps, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if middle == 0 or gaussian_delta(epsilon, steps, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def _log_phi(x: float) -> float:
    """Return the logarithm of the standard normal distribution's cumulative function, far in the tail as well."""
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    inverse = 1 / (x * x)  # the asymptotic series; the first term left out is below 1e-10 of the sum
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-inverse + 3 * inverse**2 - 15 * inverse**3)
