"""exp, log and powers whose bits are the same on every machine.

Those of `math` come from the C library, which has each in versions with and without fused multiply-add, takes the one for the
CPU at hand, and changes them from release to release: the last bits differ. `decimal` computes with integers: here each result
is a function of its arguments alone, computed with 28 digits and rounded to a float. (`sum` of floats is no better: CPython
3.12 began to compensate it. `math.fsum` is exact.)
"""

from __future__ import annotations

from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache

__all__ = ["exp", "log", "moving_rate", "power"]

_CONTEXT = Context(prec=28, Emax=MAX_EMAX, Emin=MIN_EMIN)
_BELOW_ALL_FLOATS = -1000.0  # e to that is 0 as a float


def exp(x: float) -> float:
    """Return e ** x for x of at most 0."""
    return float(_CONTEXT.exp(Decimal(max(x, _BELOW_ALL_FLOATS))))


@lru_cache(maxsize=256)  # settings and numbers of inner steps come again and again
def log(x: float) -> float:
    """Return the natural logarithm of a finite x above 0."""
    return float(_CONTEXT.ln(Decimal(x)))


@lru_cache(maxsize=1024)
def power(base: float, exponent: float) -> float:
    """Return base ** exponent, of a finite base above 0 or of 0 with an exponent above 0."""
    return float(_CONTEXT.power(Decimal(base), Decimal(exponent)))


@lru_cache(maxsize=1024)
def moving_rate(alpha: float, count: int) -> float:
    """Return alpha / (1 - (1 - alpha) ** count), the weight of the last of `count` values in a moving mean; alpha in (0, 1]."""
    exact = Decimal(alpha)
    forgotten = _CONTEXT.power(_CONTEXT.subtract(Decimal(1), exact), Decimal(count))
    return float(_CONTEXT.divide(exact, _CONTEXT.subtract(Decimal(1), forgotten)))
