"""The public grid of masked vectors: against the oracle, bounded, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edit import reference
from edit.trust.mask_grid import BLOCK, dequantise, first_exponent, grid_exponents, largest, quantise, weighted_mean


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000])
def test_exponents_and_integers_are_those_of_the_oracle(bits: int, numel: int) -> None:
    numbers = np.random.default_rng(numel)
    merged = (numbers.standard_normal(numel) * np.exp(numbers.standard_normal(numel))).astype(np.float32)
    merged[BLOCK : 2 * BLOCK] *= 1e-6  # a block below the floor
    vector = numbers.standard_normal(numel).astype(np.float32)
    limit = largest(bits, 5)
    exponents = grid_exponents(merged, bits, limit)
    integers = quantise(vector, 0.7, exponents, limit)
    steps = reference.masked_steps(torch.from_numpy(merged), bits, 5)
    expected = reference.masked_integers(torch.from_numpy(vector), steps, 0.7, bits, 5)
    assert integers.tolist() == expected.tolist()


@given(st.integers(-100, 100), st.sampled_from([0.75, 1.0, 1.25]))
def test_a_scale_is_the_power_of_two_at_or_above(exponent: int, factor: float) -> None:
    assert first_exponent(factor * 2.0**exponent, 1) == exponent + (factor > 1)


def test_scales_stay_normal_numbers() -> None:
    assert grid_exponents(np.zeros(3, np.float32), 16, 5).tolist() == [-126]
    assert first_exponent(1e-60, 1) == -126 and first_exponent(1e60, 1) == 127


@given(st.integers(3, 64), st.sampled_from([16, 32]))
def test_a_sum_of_the_largest_does_not_wrap(peers: int, bits: int) -> None:
    limit = largest(bits, peers)
    integers = quantise(np.array([3e38, -3e38], np.float32), 3.0, np.array([-126], np.int8), limit)
    assert integers.tolist() == [limit, -limit] and peers * limit < 1 << (bits - 1)


def test_too_many_peers_for_the_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="128 peers"):
        largest(8, 128)


def test_what_the_clamp_cuts_off_is_kept_and_sent_later() -> None:
    exponents, limit = np.array([0], np.int8), 10
    vector = np.array([37.0, -0.25, 3.0], np.float32)
    sent, owed = np.zeros(3), np.zeros(3, np.float32)
    for step in range(9):
        staged = (owed + vector if step == 0 else owed).astype(np.float32)
        integers = quantise(staged, 0.5, exponents, limit)
        owed = staged - dequantise(integers, 0.5, exponents)
        sent += weighted_mean(integers, exponents, 0.5)
    assert sent + owed == pytest.approx(vector) and owed.tolist() == [1.0, -0.25, -1.0]


def test_the_weighted_mean_is_that_of_what_was_sent() -> None:
    numbers = np.random.default_rng(0)
    vectors = [numbers.standard_normal(600).astype(np.float32) for _ in range(4)]
    weights = [0.3, 1.0, 1.7, 0.6]
    limit = largest(16, 4)
    exponents = grid_exponents(np.mean(vectors, 0, dtype=np.float32), 16, limit)
    total = np.sum([quantise(u, w, exponents, limit) for u, w in zip(vectors, weights, strict=True)], 0)
    mean = sum(w * u.astype(np.float64) for u, w in zip(vectors, weights, strict=True)) / sum(weights)
    steps = np.repeat(np.ldexp(1.0, exponents.astype(int)), BLOCK)[:600]
    assert (np.abs(weighted_mean(total, exponents, sum(weights)) - mean) <= 4 * 0.5 * steps / sum(weights) * 1.001).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_is_not_masked(number: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantise(np.array([0.0, number], np.float32), 1.0, np.array([0], np.int8), 9)


def test_a_grid_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 exponents for 257"):
        quantise(np.zeros(257, np.float32), 1.0, np.array([0], np.int8), 9)
