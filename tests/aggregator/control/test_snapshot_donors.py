"""Which members the coordinator names as donors of a snapshot: those that have that very snapshot, and not all of them."""

from __future__ import annotations

import dataclasses

from aggregator.control.membership import Member, MemberState
from aggregator.control.snapshot_donors import donors_of
from editpb.limits import MAX_DONORS
from editpb.messages import Donor, Heartbeat, PeerState, Serving, SnapshotManifest
from tests.support.wire import DIGEST, SCHEMA

MANIFEST = SnapshotManifest(outer_step=12, digest=DIGEST, schema=SCHEMA, fragment_hash=(bytes(32), bytes(32)))


def member(peer_id: str, state: MemberState = MemberState.TRAINING, **changes: object) -> Member:
    beat = Heartbeat(state=PeerState.TRAINING, outer_step=12, digest=DIGEST, serving=Serving(f"{peer_id}:7801", "word"))
    beat = dataclasses.replace(beat, **changes)  # type: ignore[arg-type]
    return Member(peer_id=peer_id, state=state, reason="", last_seen=0.0, attendance=1, heartbeat=beat)


def test_a_member_that_reports_the_committed_step_and_digest_is_a_donor() -> None:
    exchanging = member("b", MemberState.EXCHANGING)
    assert donors_of(MANIFEST, [exchanging], "a") == (Donor("b", Serving("b:7801", "word")),)


def test_nobody_else_is() -> None:
    silent = member("silent")
    silent.heartbeat = None
    others = [
        member("a"),  # who asks
        member("below", outer_step=11),
        member("ahead", outer_step=13),
        member("other", digest="0" * 64),
        member("mute", digest=""),
        member("closed", serving=None),
        member("lost", MemberState.LOST),
        member("left", MemberState.LEFT),
        member("evicted", MemberState.EVICTED),
        silent,
    ]
    assert donors_of(MANIFEST, others, "a") == ()


def test_of_many_donors_readers_are_told_a_few_and_not_all_the_same() -> None:
    many = [member(f"peer-{i}") for i in range(40)]
    told = [donors_of(MANIFEST, many, f"reader-{i}") for i in range(40)]
    assert {len(donors) for donors in told} == {MAX_DONORS}
    named = {donor.peer_id for donors in told for donor in donors}
    assert len(named) > 30, "the load is shared"
    assert told[0] == donors_of(MANIFEST, reversed(many), "reader-0")
