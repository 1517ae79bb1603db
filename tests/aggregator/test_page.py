"""Who may look at the page of `edit-coordinator web` on other addresses: whom members.json knows, with its key of now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from aggregator.page import serve_operators_page
from aggregator.security.authority import Authority
from edit.errors import StorageError
from edit.web.serve import WhyRefused
from editpb.identity import from_certificate
from tests.aggregator.security.test_authority import NOW, invite, new_key, redeem
from tests.support.served import new_folder


def test_a_key_that_was_replaced_and_an_evicted_observer_without_a_row_are_shut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decides = list[WhyRefused]()
    monkeypatch.setattr("aggregator.page.serve_page", lambda *_, **options: decides.append(options["why_refused"]))
    folder = new_folder(tmp_path / "run")
    options: dict[str, Any] = {"certificate": None, "key": None, "beside": {}, "say": print}
    serve_operators_page(folder, listen="127.0.0.1:0", **options)
    serve_operators_page(folder, listen="192.0.2.1:8443", **options)
    local, decide = decides
    assert local is None

    def why(certificate: x509.Certificate) -> str | None:
        return decide(from_certificate(certificate), certificate)

    authority = Authority.load(folder.path, folder.run_id)
    old = redeem(authority, invite(authority, role="observer").token, new_key())
    stranger = authority.issuer.issue(from_certificate(old), new_key().public_key(), lifetime_s=60, now=NOW)
    assert why(old) is None and "replaced by a newer one" in (why(stranger) or "")
    new = redeem(authority, invite(authority, role="observer").token, new_key())
    assert "replaced by a newer one" in (why(old) or "") and why(new) is None
    authority.members.evict("alice", "looked too long")
    assert why(new) == "looked too long"
    (folder.path / "members.json").write_text("{")
    assert why(new) == "looked too long", "who is known to be shut out stays so"
    (folder.path / "members.json").unlink()
    assert why(new) == "looked too long"
    with pytest.raises(StorageError, match="is missing"):
        serve_operators_page(folder, listen="192.0.2.1:8443", **options)
