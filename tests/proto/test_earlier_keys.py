"""The certificates of a member's earlier keys, in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import new_key
from edit.errors import ConfigError
from editpb.earlier_keys import earlier_keys, keep_earlier, public_key_of
from editpb.identity import Identity

RUN, NOW = "run-0123abcd", 1_800_000_000.0
ALICE = Identity(RUN, "peer", "alice")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    (tmp_path / "state").mkdir()
    return Authority.create(tmp_path / "state", RUN, ("localhost",), now=NOW)


def certified(authority: Authority, identity: Identity = ALICE) -> x509.Certificate:
    return authority.issuer.issue(identity, new_key().public_key(), lifetime_s=60, now=NOW)


def stored(home: Path, certificate: x509.Certificate, identity: Identity = ALICE) -> None:
    """As an enrolment stores a certificate."""
    keep_earlier(home, identity, home / "peer.pem", certificate)
    (home / "peer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def test_each_key_that_another_one_followed_is_kept_once(authority: Authority, tmp_path: Path) -> None:
    first, second, third = (certified(authority) for _ in range(3))
    for each in (first, first, second, second, third):
        stored(tmp_path, each)
    assert earlier_keys(tmp_path, ALICE) == (public_key_of(first), public_key_of(second))
    keep_earlier(tmp_path, ALICE, tmp_path / "state" / "nothing", first)
    assert len(earlier_keys(tmp_path, ALICE)) == 2


def test_a_renewed_certificate_is_of_no_earlier_key(authority: Authority, tmp_path: Path) -> None:
    key = new_key().public_key()
    for now in (NOW, NOW + 30):
        stored(tmp_path, authority.issuer.issue(ALICE, key, lifetime_s=60, now=now))
    assert earlier_keys(tmp_path, ALICE) == () and not (tmp_path / "earlier.pem").exists()


def test_what_another_member_had_in_the_folder_is_not_its_own(authority: Authority, tmp_path: Path) -> None:
    bob = Identity(RUN, "peer", "bob")
    stored(tmp_path, certified(authority, bob), bob)
    stored(tmp_path, mine := certified(authority))
    assert earlier_keys(tmp_path, ALICE) == ()
    stored(tmp_path, certified(authority))
    assert earlier_keys(tmp_path, ALICE) == (public_key_of(mine),) and earlier_keys(tmp_path, bob) == ()


@pytest.mark.parametrize("damage", [b"", b"what is no certificate"])
def test_a_damaged_file_is_named(authority: Authority, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "earlier.pem").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"earlier\.pem: cannot be read .*; restore it from a copy"):
        earlier_keys(tmp_path, ALICE)


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_torn_file_is_no_shorter_one(authority: Authority, tmp_path: Path, cut: int) -> None:
    for _ in range(3):
        stored(tmp_path, certified(authority))
    whole = earlier_keys(tmp_path, ALICE)
    data = (tmp_path / "earlier.pem").read_bytes()
    (tmp_path / "earlier.pem").write_bytes(data[:-cut])
    if cut == 1:  # the line end
        assert earlier_keys(tmp_path, ALICE) == whole
        return
    with pytest.raises(ConfigError, match=r"earlier\.pem: cannot be read .*; restore it from a copy"):
        earlier_keys(tmp_path, ALICE)


def test_a_present_certificate_that_is_damaged_tells_no_key(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "peer.pem").write_bytes(b"damaged")
    stored(tmp_path, certified(authority))
    assert earlier_keys(tmp_path, ALICE) == ()
