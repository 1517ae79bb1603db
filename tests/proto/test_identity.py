"""Only what the certificate says counts, and it must say exactly one thing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import ConfigError, RefusedError
from editpb.identity import ROLES, Identity, from_auth_context, from_uri
from tests.support.exhaustive import examples

_IDS = st.text("abcXYZ019._-", min_size=1, max_size=64).filter(lambda text: text not in (".", ".."))
SAN = "x509_subject_alternative_name"


@given(run_id=_IDS, role=st.sampled_from(ROLES), peer_id=_IDS)
@settings(deadline=None, max_examples=examples(60))
def test_an_identity_survives_as_a_uri(run_id: str, role: str, peer_id: str) -> None:
    identity = Identity(run_id, role, peer_id)
    assert from_uri(identity.uri) == identity
    assert from_auth_context({SAN: [b"localhost", identity.uri.encode(), b"127.0.0.1"]}) == identity


@given(text=st.text(max_size=40), prefix=st.sampled_from(["", "edit://", "edit://run/", "edit://run/peer/"]))
@settings(deadline=None, max_examples=examples(150))
def test_any_other_uri_is_refused(text: str, prefix: str) -> None:
    try:
        identity = from_uri(prefix + text)
    except RefusedError as error:
        assert "\n" not in str(error)
    else:
        assert identity.uri == prefix + text


@pytest.mark.parametrize(
    "names",
    [
        [],
        [b"localhost"],
        [b"edit://run/peer/a", b"edit://run/peer/b"],
        [b"edit://run/peer"],
        [b"edit://run/peer/a/b"],
        [b"edit://run/janitor/a"],
        [b"edit://run/peer/" + b"a" * 65],
        [b"edit://run/peer/\xff"],
        [b"EDIT://run/peer/a"],
        [b"edit:///peer/a"],
    ],
)
def test_a_certificate_without_exactly_one_good_name_is_refused(names: list[bytes]) -> None:
    with pytest.raises(RefusedError, match=r"^the certificate"):
        from_auth_context({SAN: names})


def test_a_connection_without_a_certificate_is_refused() -> None:
    with pytest.raises(RefusedError, match="names 0 members"):
        from_auth_context({"transport_security_type": [b"ssl"], "x509_common_name": [b"alice"]})


@pytest.mark.parametrize(
    ("run_id", "role", "peer_id"),
    [("", "peer", "a"), ("r", "Peer", "a"), ("r", "peer", "a b"), ("r", "peer", ".."), (".", "peer", "a")],
)
def test_an_identity_that_could_not_stand_in_a_certificate_is_an_error(run_id: str, role: str, peer_id: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Identity(run_id, role, peer_id)
