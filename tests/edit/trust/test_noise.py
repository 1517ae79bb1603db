"""The noise is normal, of the right size, and never the same twice."""

import numpy as np
import pytest

from edit.trust.noise import SecretNoise


def fixed(size: int) -> bytes:
    return bytes(range(size))


def test_a_million_values_are_normal() -> None:
    from scipy import stats

    values = SecretNoise(fixed).normal(1_000_000)
    assert values.var() == pytest.approx(1, abs=0.006)  # 4 standard errors
    assert values.mean() == pytest.approx(0, abs=0.004)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.004
    assert float(np.abs(values).max()) > 4.5


def test_values_go_on_and_do_not_come_again() -> None:
    noise = SecretNoise(fixed)
    assert np.array_equal(np.concatenate([noise.normal(16384), noise.normal(100)]), SecretNoise(fixed).normal(16484))
    assert noise.normal(0).shape == (0,)
    assert len(np.unique(SecretNoise(fixed).normal(10_000))) == 10_000


def test_the_key_is_the_operating_systems() -> None:
    assert not np.array_equal(SecretNoise().normal(10), SecretNoise().normal(10))
