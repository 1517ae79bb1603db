"""exp, log and powers: what `math` says within its rounding, and the nearest float itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.merging.portable_math import exp, log, moving_rate, power

POSITIVE = st.floats(5e-324, 1e308)


@given(st.floats(-1000, 0))
def test_exp(x: float) -> None:
    assert exp(x) == pytest.approx(math.exp(x), rel=1e-15, abs=5e-324)


@given(POSITIVE)
def test_log(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=1e-15)


@given(st.integers(1, 1 << 20), st.floats(0, 10))
def test_power_of_a_staleness(age: int, exponent: float) -> None:
    assert power(age, -exponent) == pytest.approx(age**-exponent, rel=1e-14)


@given(st.floats(1e-6, 1), st.integers(1, 1 << 40))
def test_moving_rate(alpha: float, count: int) -> None:
    expected = alpha / -math.expm1(count * math.log1p(-alpha)) if alpha < 1 else 1.0
    assert moving_rate(alpha, count) == pytest.approx(expected, rel=1e-12)


def test_the_nearest_float_comes_out() -> None:
    assert exp(-1.0) == 0.36787944117144232159552377016146
    assert log(10.0) == 2.302585092994045684017991454684364
    assert power(2, 0.5) == 1.4142135623730950488016887242097


def test_the_ends_of_the_ranges() -> None:
    assert exp(0.0) == 1.0 == power(1, -0.0) == power(7, 0.0)
    assert exp(-1e308) == 0.0 == exp(-math.inf) == power(0.0, 3)
    assert moving_rate(1.0, 5) == 1.0 and moving_rate(0.02, 1) == 1.0 and moving_rate(0.5, 2) == 0.5 / 0.75
    assert log(1.0) == 0.0 and math.isnan(exp(math.nan))
