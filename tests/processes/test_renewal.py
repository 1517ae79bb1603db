"""A running peer renews its certificate: it stays in the run, and nothing of a round is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from editpb.identity import Identity
from editpb.validity import DAY_S, Validity
from peers.identity.peer_folder import PeerFolder
from tests.support.daemons import Site, small

DER = serialization.Encoding.DER


@pytest.mark.timeout(120)
def test_a_running_peer_renews_its_certificate_and_loses_no_round(tmp_path: Path) -> None:
    with Site(tmp_path, small("renewal", sync={"every": 2, "outer_steps": 6})) as site:
        folder = StateFolder(site.state)
        authority, alice, key = Authority.load(folder.path, folder.run_id), Identity(folder.run_id, "peer", "a"), new_key()
        issued = time.time() - 300 * DAY_S
        first = authority.issuer.issue(alice, key.public_key(), lifetime_s=365 * DAY_S, now=issued)
        authority.members.add(alice, first, issued)
        coordinator = site.serve()
        home = PeerFolder(tmp_path / "a")
        home.path.mkdir()
        (home.path / "peer.key").touch(mode=0o600)
        (home.path / "peer.key").write_bytes(key_pem(key))
        home.store(alice, (folder.bound()["listen"],), first.public_bytes(DER), authority.ca_der)

        peer = site.peer("a")
        assert peer.finish() == 0
        coordinator.until("finished at outer step 6")
        second = x509.load_pem_x509_certificate((home.path / "peer.pem").read_bytes())
        assert Validity.of(second).ends == pytest.approx(time.time() + 365 * DAY_S, abs=600)
        assert second.public_key() == first.public_key()
        assert any("the certificate is renewed and expires in 364 days" in line for line in peer.lines), peer.lines
        rounds = [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if line["kind"] == "round"]
        assert [line["committed"] for line in rounds] == [True] * 6 and not any(line["missing"] for line in rounds)
        assert any("a: its certificate is renewed" in line for line in coordinator.lines)
        (row,) = site.status()["members"]
        assert row["expires"] == pytest.approx(Validity.of(second).ends, abs=1)
