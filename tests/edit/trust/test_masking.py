"""The masked round: the sum is exact whoever drops out, a lie is named, and no two sums differ by few peers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import RemoteProtocolError, StaleError
from edit.trust.mask_grid import largest
from edit.trust.mask_roster import Advert, Roster, advertise, threshold_of
from edit.trust.masking import (
    Abort,
    AskConfirm,
    AskReveal,
    Back,
    Close,
    Complaint,
    Confirm,
    Ended,
    Gone,
    MaskServer,
    Opening,
    PeerStep,
    Reveal,
    ServerStep,
    Shares,
    ShowInbox,
    ShowRoster,
    Tick,
    _box_context,
    _box_key,
    _box_said,
)
from edit.trust.masks import LANES, as_words, lanes_of, open_box, shared_secret, signed
from edit.trust.revealed_sets import RevealedSets
from edit.trust.shamir import SHARE_BYTES
from tests.support.exhaustive import examples

from .masked_round import (
    ADVERT,
    ANSWER_S,
    CONFIRM,
    FLOOR_S,
    REVEAL,
    ROUND,
    SHARE,
    UPLOAD,
    MaskedRound,
    names,
    signer,
)

NUMEL = 41
_IN_BOXES = ("boxes", "digests", "signatures")


@settings(deadline=None, max_examples=examples(20))
@given(st.data())
def test_the_sum_is_that_of_the_integers_for_any_drops_and_any_split_over_ranks(data: st.DataObject) -> None:
    count, bits = data.draw(st.integers(3, 16)), data.draw(st.sampled_from([8, 16, 32]))
    peers = names(count)
    dropped = data.draw(st.sets(st.sampled_from(peers), max_size=count - threshold_of(count)))
    drops = {peer: data.draw(st.sampled_from([ADVERT, SHARE, UPLOAD, CONFIRM, REVEAL])) for peer in sorted(dropped)}
    if count - sum(step == ADVERT for step in drops.values()) < 3:
        return
    played = MaskedRound(peers, drops=drops).run()
    # Who did not advertise is on no roster, so the threshold is that of the others.
    if played.opening is None:
        assert played.aborted is not None and played.server.roster is not None
        late = [step for step in drops.values() if step != ADVERT]
        assert len(played.server.roster.peers) - len(late) < played.server.roster.threshold
        return
    limit = largest(bits, count)
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    vectors = {peer: numbers.integers(-limit, limit + 1, NUMEL) for peer in sorted(played.opening.survivors)}
    total, lanes = as_words(np.zeros(NUMEL, np.int64), bits), as_words(np.zeros(LANES, np.int64), bits)
    for peer, vector in vectors.items():
        words = as_words(vector, bits)
        own_lanes = lanes_of(words)
        ends = [0, *sorted(data.draw(st.lists(st.integers(0, NUMEL), max_size=3))), NUMEL]
        for start, end in pairwise(ends):  # each rank its own run
            played.masks[peer].apply(words[start:end], 5, start)
        played.masks[peer].apply(own_lanes, 5, NUMEL)
        total += words
        lanes += own_lanes
    half = NUMEL // 2
    played.opening.apply(total[:half], 5, 0)
    played.opening.apply(total[half:], 5, half)
    played.opening.apply(lanes, 5, NUMEL)
    assert signed(total).tolist() == sum(vectors.values()).tolist()  # type: ignore[union-attr]
    Opening.check(total, lanes, 5)
    total[:1] += 1  # of an array it wraps
    with pytest.raises(RemoteProtocolError, match="fragment 5"):
        Opening.check(total, lanes, 5)


def test_nobody_waits_when_all_answer() -> None:
    played = MaskedRound(names(4)).run()
    assert played.opening is not None and played.now == 0 and not played.errors and not played.ended
    assert played.server.step is ServerStep.OPEN and played.server.handle(Tick(), 99.0) == []


@pytest.mark.parametrize(
    ("drops", "step"),
    [({0: SHARE, 1: SHARE}, "shared"), ({0: UPLOAD, 1: UPLOAD}, "complete")],
)
def test_too_few_peers_end_the_round(drops: dict[int, int], step: str) -> None:
    played = MaskedRound(names(4), drops={names(4)[at]: when for at, when in drops.items()}).run()
    assert played.opening is None and played.aborted is not None
    assert step in played.aborted.reason and played.aborted.blamed == ()


@pytest.mark.parametrize(("min_peers", "quorum"), [(3, 2), (2, 3)])
def test_no_roster_is_shown_before_enough_have_advertised(min_peers: int, quorum: int) -> None:
    server = MaskServer(
        ROUND, names(2), most=4, min_peers=min_peers, quorum=quorum, floor_s=FLOOR_S, answer_s=ANSWER_S, now=0.0
    )
    for name in names(2):
        assert server.handle(advertise(name, name.encode().ljust(32), ROUND, signer(name)), 0.0) == []
    assert server.handle(Tick(), 2 * FLOOR_S) == [] and server.roster is None
    late = names(3)[2]
    advert = advertise(late, late.encode().ljust(32), ROUND, signer(late))
    assert [type(each) for each in server.handle(advert, 99.0)] == [ShowRoster]


def test_a_peer_opens_no_sum_of_fewer_than_the_quorum_whatever_the_coordinator_makes_of_it() -> None:
    played = MaskedRound(names(6), drops={"peer-05": UPLOAD}, quorum=2, known_quorum=6).run()
    assert played.opening is None
    assert {played.ended[peer] for peer in names(5)} == {"5 peers are left, at least 6 are needed"}
    played = MaskedRound(names(5), quorum=2, known_quorum=6).run()
    assert {played.ended[peer] for peer in names(5)} == {"5 peers would be in the sum, at least 6 are asked for"}


def test_a_round_whose_sharers_make_no_quorum_is_aborted_before_anybody_masks() -> None:
    played = MaskedRound(names(4), drops={"peer-03": SHARE}, quorum=4).run()
    assert played.aborted is not None and not played.masks
    assert played.aborted.reason == "3 of 4 peers shared their keys, at least 4 are needed"


def test_a_roster_has_no_more_peers_than_the_grid_has_room_for() -> None:
    server = MaskServer(ROUND, names(5), most=3, min_peers=2, quorum=2, floor_s=FLOOR_S, answer_s=ANSWER_S, now=0.0)
    adverts = [advertise(name, name.encode().ljust(32), ROUND, signer(name)) for name in names(4)]
    shown = [server.handle(advert, 0.0) for advert in adverts[:3]]
    assert shown[:2] == [[], []] and server.roster is not None and len(server.roster.adverts) == 3
    with pytest.raises(StaleError, match="takes part in the next round"):
        server.handle(adverts[3], 0.0)


def test_who_left_and_is_back_in_time_takes_part() -> None:
    server = MaskServer(ROUND, names(3), min_peers=2, quorum=2, floor_s=FLOOR_S, answer_s=ANSWER_S, now=0.0)
    adverts = [advertise(name, name.encode().ljust(32), ROUND, signer(name)) for name in names(3)]
    server.handle(Gone(peer_id=names(3)[0]), 0.0)
    server.handle(Back(peer_id=names(3)[0]), 0.0)
    for advert in adverts:
        server.handle(advert, 0.0)
    assert server.roster is not None and server.roster.peers == tuple(names(3))


def test_an_advert_that_was_on_its_way_when_its_peer_was_lost_is_waited_for_by_nobody() -> None:
    played = MaskedRound(names(4))
    played.server.handle(Gone(peer_id="peer-00"), 0.0)
    for peer in names(4):
        played.send(peer, played.clients[peer].advert)
    assert played.server.roster is not None and played.server.roster.peers == ("peer-01", "peer-02", "peer-03")


@pytest.mark.parametrize("back_first", [True, False])
def test_who_is_lost_after_its_advert_and_back_takes_part_once_it_says_it_again(back_first: bool) -> None:
    played = MaskedRound(names(3))
    lost, *others = names(3)
    played.send(lost, played.clients[lost].advert)
    played.server.handle(Gone(peer_id=lost), 0.0)
    for peer in others:
        played.send(peer, played.clients[peer].advert)
    assert played.server.is_silent(lost) and played.server.roster is None  # min_peers = 3
    if back_first:
        played.server.handle(Back(peer_id=lost), 0.0)
        assert played.server.roster is None  # it may have been started anew
    played.send(lost, played.clients[lost].advert)
    if not back_first:
        assert played.server.roster is None  # what it said may have been on its way for long
        played.server.handle(Back(peer_id=lost), 0.0)
    assert played.server.roster is not None and not played.errors and len(played.server.roster.peers) == 3


def test_who_is_started_anew_before_the_roster_is_shown_takes_part_with_its_new_key() -> None:
    played = MaskedRound(names(3))
    lost, *others = names(3)
    for peer in (lost, others[0]):
        played.send(peer, played.clients[peer].advert)
    played.server.handle(Gone(peer_id=lost), 0.0)
    played.server.handle(Back(peer_id=lost), 0.0)
    new = advertise(lost, bytes(range(32)), ROUND, signer(lost))
    played.send(lost, new)
    played.send(others[1], played.clients[others[1]].advert)
    assert not played.errors and played.server.roster is not None and new in played.server.roster.adverts


@pytest.mark.parametrize("step", [CONFIRM, REVEAL])
def test_a_threshold_that_does_not_answer_in_time_ends_the_round_and_is_named(step: int) -> None:
    played = MaskedRound(names(4), drops={"peer-01": step, "peer-03": step}).run()
    assert played.aborted is not None and "missing: peer-01, peer-03" in played.aborted.reason
    with pytest.raises(StaleError):
        played.server.handle(Close(complete=frozenset()), 99.0)


def test_a_peer_that_left_is_not_waited_for() -> None:
    played = MaskedRound(names(4))
    assert played.server.handle(Gone(peer_id="peer-00"), 0.0) == []
    for peer in names(4)[1:]:
        played.send(peer, played.clients[peer].advert)
    assert played.server.roster is not None and played.server.roster.peers == ("peer-01", "peer-02", "peer-03")


def test_an_abort_ends_both_sides() -> None:
    played = MaskedRound(names(3))
    assert [effect.reason for effect in played.server.handle(Abort(reason="paused"), 0.0)] == ["paused"]  # type: ignore[union-attr]
    client = played.clients["peer-00"]
    assert client.handle(Abort(reason="paused")) == [Ended(reason="paused")]
    assert client.step is PeerStep.ENDED and client.handle(Abort(reason="again")) == []


# Lies of a peer.


def lie(kind: type, sender: str, **changes: Any) -> Any:
    """Return a tamper that changes fields of one peer's message; a change is a function of the field's value."""

    def tamper(peer: str, message: Any) -> Any:
        if peer != sender or not isinstance(message, kind):
            return message
        return replace(message, **{name: change(getattr(message, name)) for name, change in changes.items()})

    return tamper


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def test_a_wrong_share_names_who_revealed_it_and_the_others_open_the_sum() -> None:
    wrong = lie(Reveal, "peer-01", self_shares=lambda shares: {**shares, "peer-02": flipped(shares["peer-02"])})
    played = MaskedRound(names(4), tamper=wrong).run()
    assert played.opening is not None
    [error] = played.errors
    assert isinstance(error, RemoteProtocolError) and "peer-01 revealed" in str(error) and "peer-02 dealt" in str(error)


def test_shares_of_another_secret_than_the_published_one_name_the_dealer() -> None:
    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", self_hash=flipped)).run()
    assert played.aborted is not None and played.aborted.blamed == ("peer-02",)


@pytest.mark.parametrize("field", ["recovery", "recovery_hash"])
def test_a_wrong_recovery_names_the_dealer_that_dropped_out(field: str) -> None:
    played = MaskedRound(names(4), drops={"peer-02": UPLOAD}, tamper=lie(Shares, "peer-02", **{field: flipped})).run()
    assert played.aborted is not None and played.aborted.blamed == ("peer-02",)


def test_recovery_of_other_pair_keys_than_the_published_ones_names_the_dealer() -> None:
    def swap(keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return (flipped(keys[0]), *keys[1:])

    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", pair_digests=swap)).run()
    assert played.aborted is not None and played.aborted.blamed == ("peer-00", "peer-02") and not played.masks


def dealt_wrongly(field: str, sender: str = "peer-02") -> MaskedRound:
    """Return a round in which a dealer changes what it deals to peer-00, and signs that."""

    def tamper(peer: str, message: Any) -> Any:
        if peer != sender or not isinstance(message, Shares):
            return message
        wrong = getattr(message, field)
        lies = replace(message, **{field: (flipped(wrong[0]), *wrong[1:])})
        digests = lies.self_digests[0], lies.recovery_digests[0]
        said = _box_said(roster_of(message), names(4).index(peer), 0, lies.boxes[0], digests)
        return replace(lies, signatures=(signer(peer).sign(said), *lies.signatures[1:]))

    played = MaskedRound(names(4), tamper=tamper)

    def roster_of(message: Shares) -> bytes:
        assert played.server.roster is not None
        return played.server.roster.hash

    return played


@pytest.mark.parametrize(("field", "found"), [("self_digests", "not those that it published"), ("boxes", "cannot be opened")])
def test_shares_that_a_peer_cannot_use_are_found_before_it_masks_and_their_dealer_is_blamed(field: str, found: str) -> None:
    played = dealt_wrongly(field).run()
    assert "peer-00" not in played.masks and found in played.ended["peer-00"] and "peer-02" in played.ended["peer-00"]
    assert played.aborted is not None and played.aborted.blamed == ("peer-02",) and not played.errors
    assert found in played.aborted.reason and "peer-02 dealt to peer-00" in played.aborted.reason
    assert played.clients["peer-00"].handle(played.server.inboxes["peer-00"]) == []


def test_of_a_box_that_its_dealer_has_not_signed_as_it_is_no_secret_is_told() -> None:
    """Here the dealer itself changed it."""
    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", boxes=lambda boxes: (flipped(boxes[0]), *boxes[1:]))).run()
    assert [complaint.key for complaint in played.complaints] == [b""]
    assert played.aborted is not None and played.aborted.blamed == ("peer-02",)
    assert "peer-02 has not signed" in played.aborted.reason


@pytest.mark.parametrize("part", ["boxes", "digests", "signatures", "another peer's", "nothing"])
def test_a_coordinator_that_damages_an_inbox_is_told_no_secret(part: str) -> None:
    """With it the coordinator would have a share of each secret of an honest dealer."""
    played = MaskedRound(names(4))
    for peer in names(4):
        played.send(peer, played.clients[peer].advert)
    assert played.server.roster is not None
    for peer in names(4):
        played.tell(peer, ShowRoster(roster=played.server.roster))
    inbox, other = played.server.inboxes["peer-00"], played.server.inboxes["peer-01"]
    of_another = {name: {**getattr(inbox, name), "peer-02": getattr(other, name)["peer-02"]} for name in _IN_BOXES}
    changes: dict[str, dict[str, Any]] = {
        "boxes": {"boxes": {**inbox.boxes, "peer-02": flipped(inbox.boxes["peer-02"])}},
        "digests": {"digests": {**inbox.digests, "peer-02": inbox.digests["peer-03"]}},
        "signatures": {name: of_another[name] for name in ("boxes", "signatures")},
        "another peer's": of_another,
        "nothing": {name: {} for name in _IN_BOXES},
    }
    complaint, ended = played.clients["peer-00"].handle(replace(inbox, **changes[part]))
    dealer = "peer-01" if part == "nothing" else "peer-02"
    assert complaint == Complaint(peer_id="peer-00", dealer=dealer, key=b"") and isinstance(ended, Ended)


def test_of_a_wrong_box_of_a_dealer_that_signs_none_both_are_named() -> None:
    changes = {"boxes": lambda boxes: (flipped(boxes[0]), *boxes[1:]), "signatures": lambda _: (), "key_digests": lambda _: ()}
    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", **changes)).run()
    assert [complaint.key for complaint in played.complaints] == [b""]
    assert played.aborted is not None and played.aborted.blamed == ("peer-02", "peer-00")


def test_a_dealer_that_signs_nothing_takes_part() -> None:
    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", signatures=lambda _: (), key_digests=lambda _: ())).run()
    assert played.opening is not None and "peer-02" in played.opening.survivors and not played.complaints


def complaining(key: str) -> tuple[MaskedRound, bytes]:
    """A round in which peer-00 has the box of peer-02, and a key."""
    played = MaskedRound(names(4))
    for peer in names(4):
        played.send(peer, played.clients[peer].advert)
    roster = played.server.roster
    assert roster is not None
    for peer in names(4):
        played.tell(peer, ShowRoster(roster=roster))
    known = played.clients["peer-00"]._secrets
    keys = {"the right one": _box_key(known[2], roster.hash, 2, 0), "the secret": known[2], "none": b""}
    return played, keys[key]


def test_who_complains_of_right_shares_or_of_none_is_refused() -> None:
    played, key = complaining("the right one")
    for dealer in ("peer-02", "peer-00", "stranger"):
        played.send("peer-00", Complaint(peer_id="peer-00", dealer=dealer, key=key))
    assert [type(error) for error in played.errors] == 3 * [RemoteProtocolError] and "are right" in str(played.errors[0])
    assert played.server.step is ServerStep.COLLECTING and played.aborted is None


@pytest.mark.parametrize("key", ["the secret", "none"])
def test_where_the_key_of_a_box_is_not_the_one_that_was_published_both_are_named(key: str) -> None:
    played, told = complaining(key)
    played.send("peer-00", Complaint(peer_id="peer-00", dealer="peer-02", key=told))
    assert played.aborted is not None and played.aborted.blamed == ("peer-02", "peer-00")
    assert "one of them lies" in played.aborted.reason


@pytest.mark.parametrize("made_of", ["the same bits", "a multiple"])
def test_a_complaint_of_one_whose_key_is_made_from_that_of_another_peer_opens_no_box_of_that_one(made_of: str) -> None:
    """Then the two have one X25519 secret with each peer (bit 255 of a key does not count); a multiple can be taken back."""
    played, (liar, victim, honest) = MaskedRound(names(4)), ("peer-03", "peer-02", "peer-00")
    theirs = played.clients[victim].advert.mask_key
    factor = bytes(range(32))
    key = theirs[:31] + bytes([theirs[31] ^ 0x80]) if made_of == "the same bits" else shared_secret(factor, theirs)
    adverts = [each.advert for name, each in sorted(played.clients.items()) if name != liar]
    roster = Roster(ROUND, (*adverts, advertise(liar, key, ROUND, signer(liar))))
    (shares,) = played.clients[honest].handle(ShowRoster(roster=roster))
    (of_victim,) = played.clients[victim].handle(ShowRoster(roster=roster))
    assert isinstance(shares, Shares) and isinstance(of_victim, Shares)
    secrets = played.clients[honest]._secrets
    assert (secrets[2] == secrets[3]) == (made_of == "the same bits")
    box, digests = bytes(len(of_victim.boxes[0])), (bytes(32), bytes(32))
    inbox = ShowInbox(
        peer_id=honest,
        sharers=frozenset(names(4)),
        boxes={liar: box} | dict.fromkeys(("peer-01", victim), of_victim.boxes[0]),
        digests=dict.fromkeys(names(4)[1:], digests),
        signatures={liar: signer(liar).sign(_box_said(roster.hash, 3, 0, box, digests))},
    )
    first = replace(inbox, sharers=frozenset({honest, victim, liar}), boxes={**inbox.boxes})
    ours = of_victim.self_digests[0], of_victim.recovery_digests[0]
    complaint, _ = played.clients[honest].handle(replace(first, digests={**first.digests, victim: ours}))
    assert isinstance(complaint, Complaint) and complaint.dealer == liar and complaint.key
    told = {complaint.key, *secrets.values()} - {*secrets.values()}
    assert told == {complaint.key}, "no X25519 secret"
    for dealer, receiver, sealed in ((2, 0, of_victim.boxes[0]), (0, 2, shares.boxes[2])):
        for key in (complaint.key, _box_key(complaint.key, roster.hash, dealer, receiver)):
            with pytest.raises(ValueError):
                open_box(key, sealed, _box_context(roster.hash, dealer, receiver))


@pytest.mark.parametrize(
    "changes",
    [
        {"boxes": lambda boxes: boxes[:-1]},
        {"boxes": lambda boxes: (boxes[0] + b"x", *boxes[1:])},
        {"recovery": lambda box: box + bytes(1 << 20)},
        {"self_digests": lambda digests: digests * 9},
        {"pair_digests": lambda digests: (*digests[:-1], b"")},
        {"self_hash": lambda digest: b""},
        {"signatures": lambda signatures: signatures[:-1]},
        {"key_digests": lambda digests: (*digests[:-1], digests[-1][:-1])},
        {"key_digests": lambda _: ()},
    ],
)
def test_what_is_not_of_its_size_is_refused(changes: dict[str, Any]) -> None:
    played = MaskedRound(names(4), tamper=lie(Shares, "peer-02", **changes)).run()
    assert isinstance(played.errors[0], RemoteProtocolError) and "peer-02" in str(played.errors[0])
    assert played.opening is not None and "peer-02" not in played.opening.survivors


@pytest.mark.parametrize(
    "changes",
    [
        {"self_shares": lambda shares: {peer: share for peer, share in shares.items() if peer != "peer-00"}},
        {"recovery_shares": lambda shares: {**shares, "peer-00": bytes(SHARE_BYTES)}},
        {"self_shares": lambda shares: {**shares, "peer-00": b""}},
        {"peer_id": lambda _: "stranger"},
    ],
)
def test_a_reveal_of_other_shares_is_refused(changes: dict[str, Any]) -> None:
    played = MaskedRound(names(4), tamper=lie(Reveal, "peer-02", **changes)).run()
    assert [type(error) for error in played.errors] == [RemoteProtocolError] and played.opening is not None


def test_a_confirmation_that_is_not_signed_for_the_set_does_not_count() -> None:
    played = MaskedRound(names(4), tamper=lie(Confirm, "peer-00", signature=flipped)).run()
    assert "peer-00 did not sign" in str(played.errors[0]) and played.opening is not None


def test_an_advert_of_another_round_key_or_peer_is_refused() -> None:
    played = MaskedRound(names(3))
    server = played.server
    for changes in ({"round_id": "r0"}, {"outer_step": 6}, {"config_digest": "other"}, {"plan": bytes([1] * 32)}):
        other = replace(ROUND, **changes)  # type: ignore[arg-type]
        replayed = advertise("peer-00", bytes(range(32)), other, signer("peer-00"))
        with pytest.raises(RemoteProtocolError, match="not signed for this round"):
            server.handle(replayed, 0.0)
    advert = played.clients["peer-00"].advert
    with pytest.raises(RemoteProtocolError, match="not signed"):
        server.handle(replace(advert, mask_key=bytes(32)), 0.0)
    with pytest.raises(RemoteProtocolError, match="not signed"):
        server.handle(replace(advert, peer_id="stranger"), 0.0)
    server.handle(advert, 0.0)
    with pytest.raises(RemoteProtocolError, match="key of another peer"):
        server.handle(advertise("peer-01", advert.mask_key, ROUND, signer("peer-01")), 0.0)
    for small in (bytes(32), bytes([1]) + bytes(31), (2**255 - 20).to_bytes(32, "little")):
        with pytest.raises(RemoteProtocolError, match="peer-01 advertised a key of small order"):
            server.handle(advertise("peer-01", small, ROUND, signer("peer-01")), 0.0)
    with pytest.raises(RemoteProtocolError, match="peer-01 advertised the key of another peer"):  # one key under two names
        server.handle(advertise("peer-01", bytes(range(32)), ROUND, signer("peer-00")), 0.0)
    with pytest.raises(StaleError, match="another key"):  # it was restarted
        server.handle(advertise("peer-00", bytes(range(32)), ROUND, signer("peer-00")), 0.0)
    assert server.handle(advert, 0.0) == []


# Lies of a coordinator.


def shown(peers: int = 4) -> tuple[MaskedRound, Roster]:
    played = MaskedRound(names(peers))
    for peer, client in played.clients.items():
        played.send(peer, client.advert)
    assert played.server.roster is not None
    return played, played.server.roster


def reason(effects: list[Any]) -> str:
    [effect] = effects
    assert isinstance(effect, Ended)
    return effect.reason


def test_a_roster_with_a_swapped_key_is_refused() -> None:
    played, roster = shown()
    first, second, *others = roster.adverts
    key = bytes(range(32))
    client = played.clients["peer-00"]
    swapped = Roster(ROUND, (first, replace(second, mask_key=key), *others))
    assert "peer-01 is not signed" in reason(client.handle(ShowRoster(roster=swapped)))
    own = Roster(ROUND, (replace(first, mask_key=key), second, *others))
    assert "peer-01" not in (why := reason(played.clients["peer-01"].handle(ShowRoster(roster=own)))) and "peer-00" in why


def test_a_roster_with_another_advert_of_this_peer_or_without_it_is_refused() -> None:
    played, roster = shown()
    first, second, *others = roster.adverts
    again = advertise("peer-00", bytes(range(32)), ROUND, signer("peer-00"))
    assert "this peer" in reason(played.clients["peer-00"].handle(ShowRoster(roster=Roster(ROUND, (again, second, *others)))))
    assert "this peer" in reason(played.clients["peer-01"].handle(ShowRoster(roster=Roster(ROUND, (first, *others)))))


def test_a_roster_that_is_too_small_or_of_another_round_or_has_invented_members_is_refused() -> None:
    played, roster = shown()
    few = Roster(ROUND, roster.adverts[:2])
    assert "2 peers would be in the sum" in reason(played.clients["peer-00"].handle(ShowRoster(roster=few)))
    other = Roster(replace(ROUND, round_id="r2"), roster.adverts)
    assert "another round" in reason(played.clients["peer-01"].handle(ShowRoster(roster=other)))
    invented = Roster(ROUND, (*roster.adverts, advertise("sybil", bytes(range(32)), ROUND, signer("sybil"))))
    assert "sybil is not a pinned member" in reason(played.clients["peer-02"].handle(ShowRoster(roster=invented)))


@pytest.mark.parametrize(
    "adverts",
    [
        lambda all_: all_[::-1],
        lambda all_: all_[:1],
        lambda all_: [*all_, all_[-1]],
        lambda all_: [all_[0], replace(all_[0], peer_id="z")],
    ],
)
def test_what_is_no_roster_is_refused(adverts: Any) -> None:
    _, roster = shown()
    with pytest.raises(ValueError):
        Roster(ROUND, tuple(adverts(list(roster.adverts))))


def masking(peers: int = 4) -> MaskedRound:
    played, roster = shown(peers)
    for peer in roster.peers:
        played.tell(peer, ShowRoster(roster=roster))
    for peer, inbox in played.server.inboxes.items():
        played.tell(peer, inbox)
    assert len(played.masks) == peers
    return played


def test_a_peer_signs_one_set_in_a_round() -> None:
    played = masking()
    client = played.clients["peer-00"]
    all_, three = frozenset(names(4)), frozenset(names(3))
    [first] = client.handle(AskConfirm(survivors=all_))
    assert client.handle(AskConfirm(survivors=all_)) == [first]
    assert reason(client.handle(AskConfirm(survivors=three))) and client.step is PeerStep.ENDED


def test_a_peer_reveals_only_for_the_set_that_a_threshold_signed() -> None:
    played = masking()
    all_, three = frozenset(names(4)), frozenset(names(3))
    signatures = {}
    for peer in names(3):
        [confirm] = played.clients[peer].handle(AskConfirm(survivors=three))
        assert isinstance(confirm, Confirm)
        signatures[peer] = confirm.signature
    assert "0 peers signed" in reason(played.clients["peer-03"].handle(AskReveal(survivors=all_, signatures=signatures)))
    assert "another" in reason(played.clients["peer-00"].handle(AskReveal(survivors=all_, signatures=signatures)))
    few = dict(list(signatures.items())[:2])
    assert "2 peers signed" in reason(played.clients["peer-01"].handle(AskReveal(survivors=three, signatures=few)))
    asked = AskReveal(survivors=three, signatures=signatures)
    effects = played.clients["peer-02"].handle(asked)
    assert isinstance(effects[1], Reveal) and not effects[1].self_shares.keys() & effects[1].recovery_shares.keys()
    assert played.clients["peer-02"].handle(asked) == effects


@pytest.mark.parametrize("survivors", [names(2), [*names(3)[1:], "peer-03"], [*names(4), "stranger"]])
def test_a_set_that_is_too_small_or_wrong_is_not_signed(survivors: list[str]) -> None:
    assert reason(masking().clients["peer-00"].handle(AskConfirm(survivors=frozenset(survivors))))


@pytest.mark.parametrize("sharers", [names(2), names(4)[1:], [*names(4), "stranger"]])
def test_an_inbox_of_other_sharers_is_refused(sharers: list[str]) -> None:
    played, roster = shown()
    for peer in roster.peers:
        played.tell(peer, ShowRoster(roster=roster))
    inbox = played.server.inboxes["peer-00"]
    assert reason(played.clients["peer-00"].handle(replace(inbox, sharers=frozenset(sharers))))


def test_a_message_out_of_order_ends_the_round_for_the_peer() -> None:
    played, _ = shown()
    for peer, event in zip(
        names(3),
        [
            AskConfirm(survivors=frozenset(names(4))),
            AskReveal(survivors=frozenset(names(4)), signatures={}),
            ShowInbox(peer_id="peer-02", sharers=frozenset(names(4)), boxes={}, digests={}),
        ],
        strict=True,
    ):
        assert type(event).__name__ in reason(played.clients[peer].handle(event))


# Repeated rounds.

History = tuple[tuple[tuple[str, ...], ...], ...]  # per peer, the sets it revealed for


def canonical(
    histories: History, opened: frozenset[frozenset[str]], steps: tuple[int, ...], peers: list[str]
) -> tuple[History, tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Return one of the states and drops that differ only in who is called what."""
    found = []
    for order in permutations(range(len(peers))):
        name = {peers[old]: peers[new] for new, old in enumerate(order)}
        moved = tuple(tuple(sorted(tuple(sorted(name[each] for each in one)) for one in histories[old])) for old in order)
        sets = tuple(sorted(tuple(sorted(name[each] for each in one)) for one in opened))
        found.append((moved, sets, tuple(steps[old] for old in order)))
    return min(found)


def test_no_two_sums_that_were_opened_differ_by_few_peers_whatever_is_dropped_retried_and_restarted() -> None:
    """Every peer is killed at any step that changes what it knows, in each of any number of rounds of one outer step; each
    round starts peers anew from their files, under a coordinator that forgot the rounds before. A set counts as opened when a
    threshold of peers revealed for it, whether the coordinator lived to use it or not."""
    peers = names(4)
    drops = [steps for steps in product([UPLOAD, REVEAL, REVEAL + 1], repeat=len(peers)) if steps.count(UPLOAD) < 2]
    nothing: History = tuple(() for _ in peers)
    seen = {canonical(nothing, frozenset(), drops[-1], peers)}
    queue, refused, opened_twice, rounds = sorted({canonical(nothing, frozenset(), steps, peers) for steps in drops}), 0, 0, 0
    while queue:
        rounds += 1
        histories, opened, steps = queue.pop()
        revealed = {peer: RevealedSets({7: sets} if sets else {}) for peer, sets in zip(peers, histories, strict=True)}
        of_round = replace(ROUND, round_id=f"r{rounds}")
        played = MaskedRound(peers, drops=dict(zip(peers, steps, strict=True)), of_round=of_round, revealed=revealed).run()
        refused += any(" apart from the others" in why for why in played.ended.values())
        after = tuple(
            tuple(sorted({*sets, *([tuple(sorted(played.server.survivors))] if peer in played.reveals else [])}))
            for peer, sets in zip(peers, histories, strict=True)
        )
        sums = {frozenset(each) for each in opened}
        if len(played.reveals) >= threshold_of(len(peers)):
            opened_twice += played.server.survivors in sums
            sums.add(played.server.survivors)
        for one, other in product(sums, repeat=2):
            assert len(one - other) not in (1, 2), f"{sorted(one)} and {sorted(other)} were both opened"
        state = canonical(after, frozenset(sums), drops[-1], peers)
        if state not in seen:
            seen.add(state)
            queue += sorted({canonical(after, frozenset(sums), each, peers) for each in drops})
    assert refused and opened_twice


def test_adverts_say_who_signed_them() -> None:
    advert = advertise("peer-00", bytes(range(32)), ROUND, signer("peer-00"))
    assert advert.is_valid(ROUND)
    other = Advert(
        peer_id="peer-00", public_key=signer("peer-01").public_key, mask_key=advert.mask_key, signature=advert.signature
    )
    assert not other.is_valid(ROUND) and not replace(advert, peer_id="peer-01").is_valid(ROUND)
