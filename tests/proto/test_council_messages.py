"""What hosts say to each other survives the wire, and what may not be said is refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from edit.council import events as ev
from edit.council.record import MOST_PARTS, Enrolled, Member, Part, PartState, Record, Stamp, Update
from edit.errors import RemoteProtocolError
from editpb import council_pb2 as pb
from editpb.council_messages import (
    MOST_TOLD,
    Introduction,
    OfferHeader,
    Offering,
    PartOwner,
    StateAsked,
    StateDigest,
    StateHeader,
    Word,
    message_from_pb,
    message_to_pb,
    offer_header_from_pb,
    offer_header_to_pb,
    owners_from_pb,
    owners_to_pb,
    state_header_from_pb,
    state_header_to_pb,
)

UPDATE = Update(3, 5, 7, "1" * 64, "2" * 64, "3" * 64, 11)
STAMP = Stamp(1, 2, 3)
RECORD = Record(
    run_id="run",
    lineage=1,
    term=2,
    version=3,
    members={"a": Member(incarnation=1, addresses=("h:1", "[::1]:2"), maddr="m", reachable=False, authority="5", relayed=True)},
    voters=("a#1",),
    parts=(Part(owner="a", grant=1, outer_step=0, digest="0" * 64, verifiers=("a",)),),
    evicted={"b": "it lies"},
    disputes={"c": ("a", "d"), "a": ("c",), "d": ("c",)},
)
WORDS: list[Word] = [
    Introduction("run", 2**62),
    Introduction("run", 1, nonce=b"n" * 32, key=b"k" * 256, proof=b"p" * 64, started=2**62),
    ev.Hello(STAMP, RECORD.members["a"]),
    ev.News(RECORD),
    ev.Ask(4, STAMP, True, 1.5),
    ev.Vote(4, True, False),
    ev.Append(STAMP, Stamp(1, 2, 2), RECORD, 2.5),
    ev.Append(STAMP, STAMP, None, 2.5),
    ev.Accepted(4, STAMP, (PartState(), PartState(1, "4" * 64), PartState(1, "4" * 64, UPDATE)), 3.5),
    ev.Release(3, 9, "it was restarted", True),
    ev.Ended(3, 9),
    ev.Claim("p", Enrolled("0" * 31 + "7", "ab" * 32)),
    ev.Claim("eye", Enrolled("0" * 31 + "7", "ab" * 32, observer=True)),
    ev.Leave(),
    Offering(UPDATE),
    StateAsked(3, MOST_TOLD),
    StateDigest(3, 5, "1" * 64, "2" * 64),
    StateDigest(3, 0, "", ""),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_a_message_comes_back_as_it_was(word: Word) -> None:
    assert message_from_pb(pb.CouncilMessage.FromString(message_to_pb(word).SerializeToString())) == word


def test_headers_come_back_as_they_were() -> None:
    offer, state = OfferHeader(UPDATE, 5, (1, 0, 2)), StateHeader("1" * 64, 5, 6, (7, 8))
    assert offer_header_from_pb(offer_header_to_pb(offer)) == offer
    assert state_header_from_pb(state_header_to_pb(state)) == state


def _accepted(*states: pb.PartState) -> pb.CouncilMessage:
    return pb.CouncilMessage(accepted=pb.CouncilMessage.Accepted(stamp=pb.Stamp(), states=states))


def _record(**changes: object) -> bytes:
    written = message_to_pb(ev.News(replace(RECORD, evicted={}))).news.record
    for old, new in changes.items():
        written = written.replace(f'"{old}":'.encode(), f'"{old}":{new},"was":'.encode())
    return written


def _leased(lease_s: str) -> pb.CouncilMessage.News:
    written = message_to_pb(ev.News(replace(RECORD, evicted={}, lease_s=1.5))).news.record
    changed = written.replace(b'"lease_s":1.5', f'"lease_s":{lease_s}'.encode())
    assert changed != written
    return pb.CouncilMessage.News(record=changed)


@pytest.mark.parametrize(
    "message",
    [
        pb.CouncilMessage(),
        *(pb.CouncilMessage(news=_leased(lease_s)) for lease_s in ("1" + "0" * 400, "NaN", "Infinity", "1e999", "-1")),
        pb.CouncilMessage(introduction=pb.Introduction(incarnation=2**63)),
        pb.CouncilMessage(introduction=pb.Introduction(started=2**63)),
        pb.CouncilMessage(introduction=pb.Introduction(nonce=bytes(33))),
        pb.CouncilMessage(introduction=pb.Introduction(key=bytes(257))),
        pb.CouncilMessage(introduction=pb.Introduction(proof=bytes(65))),
        pb.CouncilMessage(hello=pb.CouncilMessage.Hello(member=pb.CouncilMessage.Member(addresses=["x"] * 17))),
        pb.CouncilMessage(hello=pb.CouncilMessage.Hello(member=pb.CouncilMessage.Member(addresses=["x" * 257]))),
        pb.CouncilMessage(hello=pb.CouncilMessage.Hello(member=pb.CouncilMessage.Member(maddr="a\nb"))),
        pb.CouncilMessage(ask=pb.CouncilMessage.Ask(term=2**63)),
        pb.CouncilMessage(append=pb.CouncilMessage.Append(committed=pb.Stamp(term=1))),
        pb.CouncilMessage(append=pb.CouncilMessage.Append(record=_record())),
        pb.CouncilMessage(news=pb.CouncilMessage.News()),
        pb.CouncilMessage(news=pb.CouncilMessage.News(record=b"[" * 100_000)),
        pb.CouncilMessage(news=pb.CouncilMessage.News(record=b"\xff")),
        pb.CouncilMessage(news=pb.CouncilMessage.News(record=_record(parts="[1]"))),
        pb.CouncilMessage(news=pb.CouncilMessage.News(record=_record(voters="[[]]"))),
        pb.CouncilMessage(release=pb.CouncilMessage.Release(reason="x" * 257)),
        pb.CouncilMessage(offering=pb.CouncilMessage.Offering(update=pb.PartUpdate(id=b"1"))),
        pb.CouncilMessage(state_asked=pb.CouncilMessage.StateAsked(outer_steps=MOST_TOLD + 1)),
        pb.CouncilMessage(state_asked=pb.CouncilMessage.StateAsked(part=MOST_PARTS)),
        pb.CouncilMessage(state_digest=pb.CouncilMessage.StateDigest(name=b"1" * 32)),
        pb.CouncilMessage(state_digest=pb.CouncilMessage.StateDigest(digest=b"1" * 32)),
        pb.CouncilMessage(state_digest=pb.CouncilMessage.StateDigest(name=b"1" * 32, digest=b"1" * 33)),
        pb.CouncilMessage(state_digest=pb.CouncilMessage.StateDigest(part=MOST_PARTS)),
        pb.CouncilMessage(state_digest=pb.CouncilMessage.StateDigest(outer_step=2**63)),
        _accepted(pb.PartState(digest=b"1")),
        _accepted(*[pb.PartState()] * (MOST_PARTS + 1)),
    ],
)
def test_what_may_not_be_said_is_refused_in_one_line(message: pb.CouncilMessage) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        message_from_pb(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_numbers_that_are_none_are_judged_where_they_are_used() -> None:
    word = message_from_pb(message_to_pb(ev.Vote(1, True, True, math.nan)))
    assert isinstance(word, ev.Vote) and math.isnan(word.echo)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = pb.CouncilMessage.FromString(data)
    except DecodeError:  # gRPC answers
        return
    try:
        message_from_pb(message)
    except RemoteProtocolError as error:
        assert "\n" not in str(error)


def test_owners_survive_the_wire_and_are_bounded() -> None:
    owners = (PartOwner("a", 1, ("h:1", "[::1]:2")), PartOwner("b", 2**62))
    assert owners_from_pb(owners_to_pb(owners)) == owners
    wrong = [PartOwner("a b", 1), PartOwner("a", 0), PartOwner("a", 1 << 63), PartOwner("a", 1, ("h:1",) * 17)]
    for owner in (*wrong, PartOwner("a", 1, ("h" * 257,)), PartOwner("a", 1, ("\n",))):
        with pytest.raises(RemoteProtocolError):
            owners_from_pb(owners_to_pb([owner]))
    with pytest.raises(RemoteProtocolError):
        owners_from_pb(owners_to_pb([PartOwner("a", 1)] * (MOST_PARTS + 1)))
