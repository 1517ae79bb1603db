"""What a peer's connections take from its folder: of its own keys the folder knows best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from aggregator.security.certificates import Issuer, key_pem, make_ca, new_key
from edit.trust.signatures import Signer, key_hash
from editpb.identity import Identity
from editpb.messages import ConfigChange
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import Site
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy
from peers.own_site import site_of
from tests.support.approvers import RUN, Approver, configuration

NOW = time.time()
ISSUER = Issuer(*make_ca(RUN, NOW))
ANN = Identity(RUN, "peer", "ann")


def enrolled(home: Path) -> Approver:
    """Enrol ann with the key in the folder, or with a new one."""
    folder = PeerFolder(home)
    key = folder.make_key()
    der = ISSUER.issue(ANN, key.public_key(), lifetime_s=1e6, now=NOW).public_bytes(Encoding.DER)
    folder.store(ANN, ("127.0.0.1:1",), der, ISSUER.certificate.public_bytes(Encoding.DER))
    return Approver(ANN, Signer(folder.key()), der)


def own_site(home: Path, members: Mapping[str, tuple[str, ...]]) -> Site:
    policy = SitePolicy.load(home, ANN, PeerFolder(home).key)
    return site_of(policy, PeerFolder(home), MaskFolder(home / "revealed.json", members))


def test_a_member_with_a_new_key_knows_both_whatever_its_operators_file_says(tmp_path: Path) -> None:
    before, change = configuration(1), configuration(2, sync={"every": 3})
    earlier = enrolled(tmp_path)
    (tmp_path / "peer.key").unlink()
    present = enrolled(tmp_path)
    hashes = tuple(key_hash(each.signer.public_key) for each in (earlier, present))
    assert hashes[0] != hashes[1]
    key, observer = new_key(), Identity(RUN, "observer", "bob")
    der = ISSUER.issue(observer, key.public_key(), lifetime_s=1e6, now=NOW).public_bytes(Encoding.DER)
    bob = Approver(observer, Signer(key_pem(key)), der)
    for own in ((hashes[1],), (hashes[1], hashes[0]), ("0" * 64, hashes[1]), (hashes[0],)):
        site = own_site(tmp_path, {"ann": own, "carl": ("1" * 64,)})
        assert site.masks is not None and site.masks.pinned == {"ann": hashes[1], "carl": "1" * 64}
        site.configuration.keep(before)
        approvals = earlier.approves(before, change), bob.approves(before, change)
        assert site.configuration.check(change, [ConfigChange(change, approvals)]) == ("ann", "bob")
    site = own_site(tmp_path, {"bob": ("1" * 64,)})
    assert site.masks is not None and site.masks.members == {"bob": ("1" * 64,)}
