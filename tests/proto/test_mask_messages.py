"""Messages of a masked round come back as they went, and what no message may be is refused in one line."""

from __future__ import annotations

import contextlib
import random

import pytest

from edit.errors import RemoteProtocolError
from edit.trust.mask_plan import FragmentPlan
from edit.trust.mask_roster import Roster
from edit.trust.masking import AskConfirm, Complaint, Confirm, Reveal
from editpb import masking_pb2 as pb
from editpb.mask_messages import (
    Closed,
    Done,
    plan_from_pb,
    plan_to_pb,
    reply_from_pb,
    reply_to_pb,
    request_from_pb,
    request_to_pb,
)
from tests.edit.trust.masked_round import ROUND, MaskedRound, names

PEERS = names(4)


def played() -> MaskedRound:
    return MaskedRound(PEERS, drops={PEERS[3]: 2}).run()


def test_all_that_a_peer_says_comes_back_as_it_went() -> None:
    run = played()
    shares = next(iter(run.server._shares.values())) if run.server._shares else None
    said = [run.clients[PEERS[0]].advert, Closed(), Confirm(peer_id=PEERS[0], signature=bytes(64)), run.reveals[PEERS[0]]]
    complaint = Complaint(peer_id=PEERS[0], dealer=PEERS[1], key=bytes(32))
    for each in (*said, complaint, *([shares] if shares is not None else [])):
        message = pb.MaskRequest.FromString(request_to_pb("run", 7, each).SerializeToString())
        assert request_from_pb(message, PEERS[0]) == ("run", 7, each)


def test_all_that_follows_for_a_peer_comes_back_as_it_went() -> None:
    run = played()
    assert run.server.roster is not None and run.server.asked is not None
    inbox = run.server.inboxes[PEERS[1]]
    for reply in (run.server.roster, inbox, AskConfirm(survivors=run.server.survivors), run.server.asked, Done(), None):
        message = pb.MaskReply.FromString(reply_to_pb(reply).SerializeToString())
        assert reply_from_pb(message, ROUND, PEERS[1]) == reply


def test_a_plan_comes_back_as_it_went_and_a_wrong_one_is_refused() -> None:
    plan = FragmentPlan(fragment_id=3, bits=8, limit=7, exponents=bytes([1, 255]), reference=0.25)
    assert plan_from_pb(plan_to_pb(plan)) == plan
    with pytest.raises(RemoteProtocolError, match="12 bits"):
        plan_from_pb(pb.MaskPlan(fragment_id=0, bits=12, limit=1, exponents=b"0"))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (pb.MaskRequest(run_id="run", round_id=1), "says nothing"),
        (pb.MaskRequest(run_id="run", round_id=0, confirm=b"x"), "round_id"),
        (pb.MaskRequest(run_id="", round_id=1, confirm=b"x"), "run_id"),
        (pb.MaskRequest(run_id="run", round_id=1, confirm=bytes(9000)), "9000 bytes"),
        (pb.MaskRequest(run_id="run", round_id=1, advert=pb.MaskAdvert(peer_id="other")), "an advert of 'other'"),
        (pb.MaskRequest(run_id="run", round_id=1, shares=pb.MaskShares(boxes=[b""] * 65)), "65 boxes, more than 64"),
        (
            pb.MaskRequest(run_id="run", round_id=1, reveal=pb.MaskReveal(self_shares=[pb.MaskShare(dealer="a")] * 65)),
            "65 shares, more than 64",
        ),
    ],
)
def test_what_no_peer_may_say_is_refused(message: pb.MaskRequest, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        request_from_pb(message, "a")


def test_what_no_coordinator_may_answer_is_refused() -> None:
    run = played()
    assert run.server.roster is not None
    twice = Roster(ROUND, run.server.roster.adverts)
    message = reply_to_pb(twice)
    message.roster.adverts.append(message.roster.adverts[0])
    for wrong in (message, pb.MaskReply(survivors=pb.MaskSurvivors(peers=["a b"])), pb.MaskReply(roster=pb.MaskRoster())):
        with pytest.raises(RemoteProtocolError):
            reply_from_pb(wrong, ROUND, PEERS[0])


def test_damaged_messages_are_refused_or_read_but_raise_nothing_else() -> None:
    run, draw = played(), random.Random(0)
    assert run.server.roster is not None
    whole = reply_to_pb(run.server.roster).SerializeToString()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        try:
            message = pb.MaskReply.FromString(bytes(damaged))
        except Exception:
            continue
        with contextlib.suppress(RemoteProtocolError):
            reply_from_pb(message, ROUND, PEERS[0])


def test_a_reveal_names_each_dealer_once() -> None:
    reveal = Reveal(peer_id="a", self_shares={"a": b"1"}, recovery_shares={})
    assert request_from_pb(request_to_pb("run", 1, reveal), "a")[2] == reveal
