"""An invitation is one line; a wrong one says what is wrong with it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import ConfigError, RefusedError
from editpb.identity import Identity
from editpb.invitation import Invitation, fingerprint, is_endpoint
from tests.support.exhaustive import examples

INVITATION = Invitation(
    identity=Identity("run-0123abcd", "peer", "university-a"),
    token="t" * 43,
    enrol=("127.0.0.1:7701", "host.example:7701", "[::1]:7701"),
    ca=bytes(range(200)),
    expires=2_000_000_000,
)
TEXT = INVITATION.encode()


def repacked(**changes: Any) -> str:
    packed = TEXT.removeprefix("edit1.")
    values = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    return "edit1." + base64.urlsafe_b64encode(json.dumps({**values, **changes}).encode()).decode().rstrip("=")


def test_it_survives_as_one_word_also_with_blanks_around_it() -> None:
    assert TEXT.startswith("edit1.") and not set(TEXT) & set(" \n+/=")
    assert Invitation.decode(f"  {TEXT}\n", now=1_999_999_999) == INVITATION == Invitation.decode(repacked())


def test_it_brings_the_key_of_the_audit_log_where_there_is_one() -> None:
    logged = dataclasses.replace(INVITATION, log_key="edit/run-0123abcd+12345678+AAAA")
    assert Invitation.decode(logged.encode()) == logged and Invitation.decode(TEXT).log_key == ""
    for wrong in (7, "x" * 257, "two\nlines"):
        with pytest.raises(ConfigError, match=r"cut off|altered|damaged"):
            Invitation.decode(repacked(log=wrong))


def test_an_expired_one_says_since_when() -> None:
    with pytest.raises(RefusedError, match=r"expired 2 minutes ago by this machine's clock; ask the run's operator"):
        Invitation.decode(TEXT, now=2_000_000_000 + 61)
    with pytest.raises(RefusedError):
        Invitation.decode(TEXT, now=2_000_000_000)


@pytest.mark.parametrize("text", ["", "hello", "edit.abc", "editx.abc", "edit1", "EDIT1.a", "edit1." + "A" * 20_000, "edit١.a"])
def test_what_is_not_an_invitation_is_told_so(text: str) -> None:
    with pytest.raises(ConfigError, match=r"this is not an invitation; one begins with edit1\."):
        Invitation.decode(text)


def test_another_version_is_told_so() -> None:
    with pytest.raises(ConfigError, match="has version 2, this software reads version 1"):
        Invitation.decode("edit2." + TEXT[6:])


@given(length=st.integers(6, len(TEXT) - 1))
@settings(deadline=None, max_examples=examples(100))
def test_a_truncated_one_is_told_so(length: int) -> None:
    with pytest.raises(ConfigError, match="cut off or altered"):
        Invitation.decode(TEXT[:length])


@given(text=st.text("ABCxyz019_-=+/.{}", max_size=60), binary=st.binary(max_size=60))
@settings(deadline=None, max_examples=examples(150))
def test_any_other_text_is_a_configuration_error(text: str, binary: bytes) -> None:
    for candidate in (f"edit1.{text}", "edit1." + base64.urlsafe_b64encode(binary).decode()):
        with pytest.raises(ConfigError):
            Invitation.decode(candidate)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 3},
        {"run_id": "a/b"},
        {"role": "root"},
        {"peer_id": 7},
        {"token": "short"},
        {"token": "../" + "t" * 40},
        {"enrol": []},
        {"enrol": "127.0.0.1:1"},
        {"enrol": ["127.0.0.1:1"] * 17},
        {"enrol": ["127.0.0.1"]},
        {"enrol": ["unix:/etc/passwd"]},
        {"ca": "*"},
        {"ca": ""},
        {"ca": "A" * 8000},
        {"expires": True},
        {"expires": "soon"},
        {"expires": 1 << 60},
    ],
)
def test_an_altered_one_is_told_so(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cut off or altered"):
        Invitation.decode(repacked(**changes))


@pytest.mark.parametrize("text", ["a:1", "a.b-c:65535", "10.0.0.1:80", "[fe80::1]:7700", "a.b.:1", f"{'a' * 63}.b:1"])
def test_endpoints(text: str) -> None:
    assert is_endpoint(text)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:",
        "a:0",
        "a:65536",
        ":1",
        "a b:1",
        "http://a:1",
        "fe80::1:7700",
        "a:١",
        "unix:a:1",
        "a..b:1",
        ".a:1",
        ".:1",
        f"{'a' * 64}:1",
    ],
)
def test_what_is_no_endpoint(text: str) -> None:
    assert not is_endpoint(text)


def test_the_fingerprint_is_the_sha256_as_people_compare_it() -> None:
    digest = hashlib.sha256(INVITATION.ca).hexdigest().upper()
    assert INVITATION.fingerprint == fingerprint(INVITATION.ca)
    assert INVITATION.fingerprint.startswith(f"SHA256:{digest[:2]}:{digest[2:4]}:") and len(INVITATION.fingerprint) == 102
    assert dataclasses.replace(INVITATION, ca=b"other").fingerprint != INVITATION.fingerprint
