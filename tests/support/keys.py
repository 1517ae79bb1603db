"""Private keys for tests."""

from __future__ import annotations

from aggregator.security.certificates import key_pem, new_key


def member_key() -> bytes:
    """A member's private key, P-256 in PEM."""
    return key_pem(new_key())
