"""Secrets shared among peers: any threshold of shares rebuilds, fewer or wrong ones do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.trust.shamir import MOST_SHARES, SHARE_BYTES, rebuild, split

PRIME = (1 << 256) + 297


@given(st.binary(min_size=32, max_size=32), st.integers(1, MOST_SHARES), st.data())
def test_any_threshold_of_shares_rebuilds_the_secret(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, threshold, count, random.Random(data.draw(st.integers(0, 99))).randbytes)
    assert {len(share) for share in shares} == {SHARE_BYTES}
    chosen = data.draw(st.sets(st.integers(1, count), min_size=threshold, max_size=count))
    assert rebuild({x: shares[x - 1] for x in chosen}, threshold) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_ends_of_the_range_are_shared(secret: bytes) -> None:
    shares = split(secret, 3, 4, random.Random(0).randbytes)
    assert rebuild({4: shares[3], 1: shares[0], 3: shares[2]}, 3) == secret


def test_shares_are_the_values_of_a_polynomial_over_the_prime_above_2_to_the_256() -> None:
    secret, drawn = (1 << 256) - 1, PRIME - 1
    shares = split(secret.to_bytes(32, "big"), 2, 3, lambda count: drawn.to_bytes(count, "big"))
    assert [int.from_bytes(share, "big") for share in shares] == [(secret + drawn * x) % PRIME for x in (1, 2, 3)]


def test_coefficients_at_or_above_the_prime_are_drawn_again() -> None:
    numbers = iter([PRIME, (1 << 257) - 1, 5])
    shares = split(bytes(32), 2, 2, lambda count: next(numbers).to_bytes(count, "big"))
    assert [int.from_bytes(share, "big") for share in shares] == [5, 10]


def test_a_wrong_share_rebuilds_another_secret() -> None:
    secret = random.Random(1).randbytes(32)
    shares = dict(enumerate(split(secret, 3, 5, random.Random(2).randbytes), 1))
    shares[2] = shares[3]
    try:
        assert rebuild(shares, 3) != secret
    except ValueError as error:
        assert "no secret" in str(error)


@pytest.mark.parametrize(
    "shares", [{1: bytes(33)}, {1: bytes(33), 2: bytes(32)}, {0: bytes(33), 1: bytes(33)}, {1: bytes(33), 2: b"\xff" * 33}]
)
def test_what_is_no_share_is_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError):
        rebuild(shares, 2)


@pytest.mark.parametrize(("size", "threshold", "count"), [(31, 1, 2), (32, 0, 2), (32, 3, 2), (32, 2, 65)])
def test_what_cannot_be_shared_is_refused(size: int, threshold: int, count: int) -> None:
    with pytest.raises(ValueError):
        split(bytes(size), threshold, count, random.Random(0).randbytes)
