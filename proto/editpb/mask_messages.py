"""Converts what is said in a masked round (`edit.trust.masking`) to and from masking.proto.

`x_to_pb` never fails; `x_from_pb` raises RemoteProtocolError with one line, and nothing else. What a message may have beside
its sizes, the machines of the round check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edit.trust.mask_plan import FragmentPlan
from edit.trust.mask_roster import Advert, Roster, RoundName
from edit.trust.masking import AskConfirm, AskReveal, Complaint, Confirm, Reveal, Shares, ShowInbox
from edit.trust.shamir import MOST_SHARES
from editpb import limits as lim
from editpb import masking_pb2 as pb
from editpb.limits import at_most, check_id, fail, within

__all__ = [
    "Closed",
    "Done",
    "PeerMessage",
    "plan_from_pb",
    "plan_to_pb",
    "reply_from_pb",
    "reply_to_pb",
    "request_from_pb",
    "request_to_pb",
]

_MOST_BYTES = 8192  # of any one text of bytes but the exponents: the pair keys of 64 peers are 2 kB


@dataclass(frozen=True, slots=True)
class Closed:
    """From a peer: tell me the survivors, once the round is closed."""


@dataclass(frozen=True, slots=True)
class Done:
    """To a peer: what it revealed has arrived."""


PeerMessage: TypeAlias = Advert | Shares | Complaint | Closed | Confirm | Reveal
Reply: TypeAlias = Roster | ShowInbox | AskConfirm | AskReveal | Done


def plan_to_pb(plan: FragmentPlan) -> pb.MaskPlan:
    """Encode the plan of one fragment."""
    return pb.MaskPlan(
        fragment_id=plan.fragment_id, bits=plan.bits, limit=plan.limit, exponents=plan.exponents, reference=plan.reference
    )


def plan_from_pb(message: pb.MaskPlan) -> FragmentPlan:
    """Decode the plan of one fragment."""
    try:
        return FragmentPlan(
            fragment_id=message.fragment_id,
            bits=message.bits,
            limit=message.limit,
            exponents=message.exponents,
            reference=message.reference,
        )
    except ValueError as error:
        fail(str(error))


def request_to_pb(run_id: str, round_id: int, said: PeerMessage) -> pb.MaskRequest:
    """Encode what a peer says in a round."""
    message = pb.MaskRequest(run_id=run_id, round_id=round_id)
    match said:
        case Advert():
            message.advert.CopyFrom(_advert_to_pb(said))
        case Shares():
            message.shares.CopyFrom(
                pb.MaskShares(
                    boxes=said.boxes,
                    self_digests=said.self_digests,
                    recovery_digests=said.recovery_digests,
                    pair_digests=said.pair_digests,
                    recovery=said.recovery,
                    self_hash=said.self_hash,
                    recovery_hash=said.recovery_hash,
                    signatures=said.signatures,
                    key_digests=said.key_digests,
                )
            )
        case Complaint(dealer=dealer, key=key):
            message.complaint.CopyFrom(pb.MaskComplaint(dealer=dealer, key=key))
        case Closed():
            message.closed.CopyFrom(pb.MaskNothing())
        case Confirm(signature=signature):
            message.confirm = signature
        case Reveal():
            shares = {"self_shares": said.self_shares, "recovery_shares": said.recovery_shares}
            message.reveal.CopyFrom(pb.MaskReveal(**{name: _shares_to_pb(each) for name, each in shares.items()}))
    return message


def request_from_pb(message: pb.MaskRequest, peer_id: str) -> tuple[str, int, PeerMessage]:
    """Decode run_id, round_id and what this peer, as its certificate names it, says."""
    run_id, round_id = check_id("run_id", message.run_id), within("round_id", message.round_id, 1, lim.MAX_COUNT)
    match message.WhichOneof("kind"):
        case "advert":
            if message.advert.peer_id != peer_id:
                fail(f"{peer_id} sends an advert of {message.advert.peer_id[:64]!r}")
            return run_id, round_id, _advert_from_pb(message.advert)
        case "shares":
            shares = message.shares
            return run_id, round_id, Shares(
                peer_id=peer_id,
                boxes=_each("boxes", shares.boxes),
                self_digests=_each("self_digests", shares.self_digests),
                recovery_digests=_each("recovery_digests", shares.recovery_digests),
                pair_digests=_each("pair_digests", shares.pair_digests),
                recovery=_bytes("recovery", shares.recovery),
                self_hash=_bytes("self_hash", shares.self_hash),
                recovery_hash=_bytes("recovery_hash", shares.recovery_hash),
                signatures=_each("signatures", shares.signatures),
                key_digests=_each("key_digests", shares.key_digests),
            )  # fmt: skip
        case "complaint":
            dealer, key = check_id("dealer", message.complaint.dealer), _bytes("key", message.complaint.key)
            return run_id, round_id, Complaint(peer_id=peer_id, dealer=dealer, key=key)
        case "closed":
            return run_id, round_id, Closed()
        case "confirm":
            return run_id, round_id, Confirm(peer_id=peer_id, signature=_bytes("confirm", message.confirm))
        case "reveal":
            reveal = message.reveal
            mine, theirs = _shares_from_pb(reveal.self_shares), _shares_from_pb(reveal.recovery_shares)
            return run_id, round_id, Reveal(peer_id=peer_id, self_shares=mine, recovery_shares=theirs)
    fail("a MaskRequest that says nothing")


def reply_to_pb(reply: Reply | None) -> pb.MaskReply:
    """Encode what follows for one peer; None: not yet."""
    match reply:
        case Roster():
            return pb.MaskReply(roster=pb.MaskRoster(adverts=map(_advert_to_pb, reply.adverts)))
        case ShowInbox():
            boxes = [
                pb.MaskBox(
                    dealer=dealer,
                    box=box,
                    self_digest=digests[0],
                    recovery_digest=digests[1],
                    signature=reply.signatures.get(dealer, b""),
                )
                for (dealer, box), digests in ((each, reply.digests[each[0]]) for each in sorted(reply.boxes.items()))
            ]
            return pb.MaskReply(inbox=pb.MaskInbox(sharers=sorted(reply.sharers), boxes=boxes))
        case AskConfirm(survivors=survivors):
            return pb.MaskReply(survivors=pb.MaskSurvivors(peers=sorted(survivors)))
        case AskReveal(survivors=survivors, signatures=signatures):
            each = [pb.MaskSignature(peer_id=name, signature=signature) for name, signature in sorted(signatures.items())]
            return pb.MaskReply(signatures=pb.MaskSignatures(survivors=sorted(survivors), signatures=each))
        case Done():
            return pb.MaskReply(done=pb.MaskNothing())
    return pb.MaskReply()


def reply_from_pb(message: pb.MaskReply, of_round: RoundName, peer_id: str) -> Reply | None:
    """Decode what follows for this peer, in this round; None: not yet."""
    match message.WhichOneof("kind"):
        case "roster":
            at_most("adverts", message.roster.adverts, MOST_SHARES)
            try:
                return Roster(of_round, tuple(_advert_from_pb(each) for each in message.roster.adverts))
            except ValueError as error:
                fail(str(error))
        case "inbox":
            at_most("boxes", message.inbox.boxes, MOST_SHARES)
            return ShowInbox(
                peer_id=peer_id,
                sharers=_peers("sharers", message.inbox.sharers),
                boxes={check_id("dealer", each.dealer): _bytes("box", each.box) for each in message.inbox.boxes},
                digests={
                    check_id("dealer", each.dealer): (
                        _bytes("self_digest", each.self_digest),
                        _bytes("recovery_digest", each.recovery_digest),
                    )
                    for each in message.inbox.boxes
                },
                signatures={each.dealer: _bytes("signature", each.signature) for each in message.inbox.boxes},
            )
        case "survivors":
            return AskConfirm(survivors=_peers("survivors", message.survivors.peers))
        case "signatures":
            at_most("signatures", message.signatures.signatures, MOST_SHARES)
            signatures = {
                check_id("peer_id", each.peer_id): _bytes("signature", each.signature) for each in message.signatures.signatures
            }
            return AskReveal(survivors=_peers("survivors", message.signatures.survivors), signatures=signatures)
        case "done":
            return Done()
    return None


def _advert_to_pb(advert: Advert) -> pb.MaskAdvert:
    return pb.MaskAdvert(
        peer_id=advert.peer_id, public_key=advert.public_key, mask_key=advert.mask_key, signature=advert.signature
    )


def _advert_from_pb(message: pb.MaskAdvert) -> Advert:
    return Advert(
        peer_id=check_id("peer_id", message.peer_id),
        public_key=_bytes("public_key", message.public_key),
        mask_key=_bytes("mask_key", message.mask_key),
        signature=_bytes("signature", message.signature),
    )


def _shares_to_pb(shares: Mapping[str, bytes]) -> list[pb.MaskShare]:
    return [pb.MaskShare(dealer=dealer, share=share) for dealer, share in sorted(shares.items())]


def _shares_from_pb(shares: Sequence[pb.MaskShare]) -> dict[str, bytes]:
    at_most("shares", shares, MOST_SHARES)
    return {check_id("dealer", each.dealer): _bytes("share", each.share) for each in shares}


def _peers(name: str, peers: Sequence[str]) -> frozenset[str]:
    at_most(name, peers, MOST_SHARES)
    return frozenset(check_id(name, peer) for peer in peers)


def _each(name: str, items: Iterable[bytes]) -> tuple[bytes, ...]:
    found = tuple(items)
    at_most(name, found, MOST_SHARES)
    return tuple(_bytes(name, each) for each in found)


def _bytes(name: str, data: bytes) -> bytes:
    if len(data) > _MOST_BYTES:
        fail(f"{name} has {len(data)} bytes")
    return data
