"""Means over a few seeds with their 95 % intervals, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["half_width", "mean_text"]

# 97.5 % by n - 1 = 1, 2, ... (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2); the last is too large beyond.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def half_width(values: Sequence[float]) -> float:
    """Return half of the mean's 95 % interval; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def mean_text(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean, with half of its interval where there are two values or more; "" for none."""
    if not values:
        return ""
    half = f" +- {half_width(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{half}"
