"""Members of one run with their keys, and what they say in the DHT; nodes of strangers. For tests of discovery."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.swarm.signed_records import Announcement, SignedRecords
from edit.council.record import Member, Part, Record, Stamp
from editpb.identity import Identity

RUN = "run-0"
KEY = b"the run's key"
MADDR = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMeRyCUk5dyG5REHphBwiG8eP4C13hyyyzheUgS5g4B5m"


@dataclass
class Item:
    """As hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class Run:
    """One run's authority, and the keys of whom it knows. lifetime_s: of certificates."""

    def __init__(self, path: Path, run_id: str = RUN) -> None:
        path.mkdir(exist_ok=True)
        self.path, self.run_id = path, run_id
        self.authority = Authority.create(path, run_id, ("localhost",), now=time.time())
        self.ca = (path / "ca.pem").read_bytes()

    def credentials(
        self, peer_id: str, role: str = "peer", *, run_id: str = "", begun_s: float = 0.0, lifetime_s: float = 1e5
    ) -> tuple[bytes, bytes, bytes]:
        """(private key, certificate, authority) in PEM."""
        key = new_key()
        identity, now = Identity(run_id or self.run_id, role, peer_id), time.time() - begun_s
        issued = self.authority.issuer.issue(identity, key.public_key(), lifetime_s=lifetime_s, now=now)
        return key_pem(key), issued.public_bytes(serialization.Encoding.PEM), self.ca

    def records(self, credentials: tuple[bytes, bytes, bytes], evicted: Sequence[str] = (), key: bytes = KEY) -> SignedRecords:
        """Who signs and checks as this member."""
        private_key, certificate, ca = credentials
        return SignedRecords(self.run_id, key, ca, private_key, certificate, lambda peer_id: peer_id in evicted)


def said(expires: float, /, **changes: Any) -> dict[str, object]:
    """What a member says, as the DHT's value."""
    value = Announcement(addresses=("127.0.0.1:1",), maddr=MADDR, stamp=Stamp(1, 2, 3), leader="a", expires=expires)
    return {**value.as_value(), **changes}


def signed(records: SignedRecords, peer_id: str, expires: float, value: object = None, key: bytes = KEY) -> Item:
    """What a node stores for a member."""
    body = msgpack.packb(said(expires) if value is None else value)
    item = Item(key, msgpack.packb(peer_id), body, expires)
    item.value = records.sign_value(item)
    return item


def record_with(run_id: str, maddrs: dict[str, str], evicted: Sequence[str] = ()) -> Record:
    """A record of the swarm that names the nodes of its members."""
    members = {peer_id: Member(incarnation=1, maddr=maddr) for peer_id, maddr in maddrs.items()}
    part = Part(owner="a", grant=0, outer_step=0, digest="0" * 64)
    return Record(
        run_id=run_id,
        lineage=1,
        term=1,
        version=1,
        members=members,
        voters=tuple(f"{peer_id}#1" for peer_id in members),
        parts=(part,),
        evicted=dict.fromkeys(evicted, "it lies"),
    )
