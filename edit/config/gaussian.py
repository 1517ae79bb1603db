"""What sums with Gaussian noise cost: epsilon at a given delta, the noise that fits, and how long it is.

Exact, whatever depends on the sums before: delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), mu = sqrt(steps) / z, with z
the noise's standard deviation over the most that one party can change a sum. A figure errs upwards only.

Source: Balle and Wang 2018 (arXiv 1805.06530).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["composed_multiplier", "gaussian_delta", "gaussian_epsilon", "gaussian_multiplier", "noise_length"]


def gaussian_delta(epsilon: float, steps: int, noise_multiplier: float) -> float:
    """Return delta of `steps` sums with Gaussian noise, at an epsilon: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    mu = sqrt(steps) / noise_multiplier: exact, whatever depends on the sums before.
    """
    mu = math.sqrt(steps) / noise_multiplier
    if mu == 0:
        return 0.0
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


def composed_multiplier(sums: Iterable[tuple[float, int]]) -> float:
    """Return the noise multiplier of the one sum that costs as much as all of these; infinity where there is none.

    sums: (noise multiplier, how many sums with it).
    """
    squares = math.fsum(count / (multiplier * multiplier) for multiplier, count in sums)
    return 1 / math.sqrt(squares) if squares > 0 else math.inf


def noise_length(noise_multiplier: float, numel: int, denominator: int) -> float:
    """Return how long the noise of a mean is, over its longest contribution: z sqrt(d) / n0. numel: elements of the mean."""
    return noise_multiplier * math.sqrt(numel) / denominator


def _log_phi(x: float) -> float:
    """Return the logarithm of the standard normal distribution's cumulative function, far in the tail as well."""
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    inverse = 1 / (x * x)  # the asymptotic series; the first term left out is below 1e-10 of the sum
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-inverse + 3 * inverse**2 - 15 * inverse**3)
