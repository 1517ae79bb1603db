"""Shamir's secret sharing (1979) over p = 2^256 + 297, the first prime above 2^256.

A secret of 32 bytes is the value at 0 of a random polynomial of degree threshold - 1; the share at x is the value at x, 33
bytes (big-endian). Fewer than `threshold` shares say nothing about the secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["MOST_SHARES", "SECRET_BYTES", "SHARE_BYTES", "rebuild", "split"]

SECRET_BYTES = 32
SHARE_BYTES = 33
MOST_SHARES = 64
_PRIME = (1 << 256) + 297
_BITS = _PRIME.bit_length()


def split(secret: bytes, threshold: int, count: int, draw: Callable[[int], bytes]) -> list[bytes]:
    """Return the shares at x = 1 to `count`.

    Args:
        secret: 32 bytes.
        threshold: how many shares rebuild the secret, 1 to `count`.
        count: how many shares there are, at most 64.
        draw: returns that many bytes, each from a cryptographic source (`os.urandom`).

    Raises ValueError for a secret, threshold or count out of range.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count <= MOST_SHARES:
        raise ValueError(f"cannot share {len(secret)} bytes among {count} with threshold {threshold}")
    coefficients = [int.from_bytes(secret, "big"), *(_draw_below_prime(draw) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, count + 1)]


def rebuild(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of the first `threshold` shares, by x. What it returns from a wrong share is random.

    Raises ValueError for too few shares, and for shares or places that no secret has.
    """
    points = {x: int.from_bytes(shares[x], "big") for x in sorted(shares)[:threshold]}
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{len(points)} shares, {threshold} are needed")
    if any(not 1 <= x <= MOST_SHARES or len(shares[x]) != SHARE_BYTES or y >= _PRIME for x, y in points.items()):
        raise ValueError("not a share")
    secret = 0
    for x, y in points.items():
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % _PRIME
                denominator = denominator * (other - x) % _PRIME
        secret = (secret + y * numerator * pow(denominator, -1, _PRIME)) % _PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("these shares have no secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


def _draw_below_prime(draw: Callable[[int], bytes]) -> int:
    """Return a uniform number below p, by rejection: two numbers of 257 bits are drawn on average."""
    while True:
        number = int.from_bytes(draw(SHARE_BYTES), "big") & ((1 << _BITS) - 1)
        if number < _PRIME:
            return number


def _value(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % _PRIME
    return value
