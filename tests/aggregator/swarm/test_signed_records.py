"""Who is not a member can neither write nor change nor lengthen what a member says in the DHT of where it is."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("msgpack")
import msgpack

from aggregator.swarm.signed_records import LONGEST_S, MOST_BYTES, Announcement, SignedRecords
from edit.council.record import MOST_ADDRESSES
from edit.errors import ConfigError, LocalProtocolError
from tests.support.council.announced import KEY, Item, Run, said, signed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("authority"))


def test_what_a_member_says_is_read_by_another_and_stripped(run: Run) -> None:
    b, expires = run.credentials("b"), time.time() + 60.0
    item = signed(run.records(b), "b", expires)
    others = run.records(run.credentials("a"))
    assert others.validate(item) and msgpack.unpackb(others.strip_value(item)) == said(expires)
    assert others.read(item) == ("b", Announcement.from_value(said(expires)))


def test_the_latest_of_each_member_is_found_in_any_order(run: Run) -> None:
    now, b = time.time(), run.records(run.credentials("b"))
    items = [signed(b, "b", now + s, {**said(now + s), "addresses": [f"h:{s}"]}) for s in (30, 50, 40)]
    items += [signed(run.records(run.credentials("c")), "c", now + 20), Item(KEY, b"x", b"garbage", now + 9)]
    found = run.records(run.credentials("a")).found([(i.subkey, i.value, i.expiration_time) for i in items], Item)
    assert {peer_id: each.addresses for peer_id, each in found.items()} == {"b": ("h:50",), "c": ("127.0.0.1:1",)}


Change = Callable[[Run, Item], Item]


def _resigned(**changes: object) -> Change:
    """By the member itself: it says what no member may say."""

    def change(run: Run, item: Item) -> Item:
        return signed(run.records(run.credentials("b")), "b", item.expiration_time, said(item.expiration_time, **changes))

    return change


def _by(peer_id: str, role: str = "peer", **named: object) -> Change:
    """In the name of b, by the key of another certificate."""

    def change(run: Run, item: Item) -> Item:
        return signed(run.records(run.credentials(peer_id, role, **named)), "b", item.expiration_time)

    return change


def _nested(change: Callable[[bytes, bytes], bytes]) -> Change:
    """By the member itself: it says lists in one another, as many as msgpack reads."""

    def changed(run: Run, item: Item) -> Item:
        value = msgpack.packb(said(item.expiration_time))
        new = change(value, b"\x91" * 1000 + b"\xc0")
        assert new != value
        item = dataclasses.replace(item, value=new)
        return dataclasses.replace(item, value=run.records(run.credentials("b")).sign_value(item))

    return changed


def _changed(**fields: object) -> Change:
    return lambda run, item: dataclasses.replace(item, **{k: f(item) if callable(f) else f for k, f in fields.items()})


def _other_signature(run: Run, item: Item) -> Item:
    """The certificate of b, which is no secret, with a signature by the key of c."""
    c = signed(run.records(run.credentials("c")), "b", item.expiration_time)
    (_, _, signature, value), (number, certificate, _, _) = msgpack.unpackb(c.value), msgpack.unpackb(item.value)
    return dataclasses.replace(item, value=msgpack.packb([number, certificate, signature, value]))


HOSTILE: dict[str, Change] = {
    "another member's subkey": _by("c"),
    "an operator's certificate": _by("b", "operator"),
    "a certificate of another run by the same authority": _by("b", run_id="run-1"),
    "a certificate that has ended": _by("b", begun_s=7200.0, lifetime_s=60.0),
    "a certificate without its key": _other_signature,
    "an old record with a newer expiry": _changed(expiration_time=lambda item: item.expiration_time + 10.0),
    "it has expired": _changed(expiration_time=lambda item: time.time() - 1.0),
    "it never expires": _changed(expiration_time=math.inf),
    "no number": _changed(expiration_time=math.nan),
    "a text for a number": _changed(expiration_time="soon"),
    "a number for a value": _changed(value=7),
    "another key": _changed(key=b"another run's key"),
    "no subkey": _changed(subkey=msgpack.packb(None)),
    "a subkey in another form": _changed(subkey=b"\xd9\x01b"),
    "a whole dictionary": _changed(subkey=b""),
    "garbage": _changed(value=b"\xc1\xff\x00"),
    "nothing": _changed(value=b""),
    "unsigned": _changed(value=lambda item: msgpack.packb(said(item.expiration_time))),
    "nested": _changed(value=b"\x91" * 4000),
    "a certificate that is none": _changed(value=msgpack.packb([1, b"x" * 500, b"y" * 70, b"z"])),
    "another format": _changed(value=lambda item: msgpack.packb([2, *msgpack.unpackb(item.value)[1:]])),
    "huge": _changed(value=b"\xc4" * (MOST_BYTES + 1)),
    "cut off": _changed(value=lambda item: item.value[:-1]),
    "one bit": _changed(value=lambda item: item.value[:-1] + bytes([item.value[-1] ^ 1])),
    "signed: no address": _resigned(addresses=[]),
    "signed: too many addresses": _resigned(addresses=["h:1"] * 17),
    "signed: an address that is none": _resigned(addresses=["h:1\n2"]),
    "signed: a number for an address": _resigned(addresses=[7]),
    "signed: no multiaddress": _resigned(maddr="/unix/etc/passwd"),
    "signed: a stamp of two": _resigned(stamp=[1, 2]),
    "signed: a stamp below zero": _resigned(stamp=[1, 2, -3]),
    "signed: a leader with a line in it": _resigned(leader="a\nb"),
    "signed: it says another expiry": _resigned(expires=time.time() + 1e6),
    "signed: more than it should": _resigned(more=1),
    "signed: a list in lists": _nested(lambda value, deep: deep),
    "signed: an address in lists": _nested(
        lambda value, deep: value.replace(b"\xa9addresses\x91", b"\xa9addresses\x92" + deep)
    ),
    "signed: a leader in lists": _nested(lambda value, deep: value.replace(b"\xa6leader\xa1a", b"\xa6leader" + deep)),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_counts(run: Run, change: Change) -> None:
    item = signed(run.records(run.credentials("b")), "b", time.time() + 60.0)
    others = run.records(run.credentials("a"))
    assert others.validate(item)
    assert not others.validate(change(run, item))


def test_a_member_can_neither_use_another_key_nor_the_past_nor_much_room(run: Run) -> None:
    """What it signs right, and says right."""
    credentials, others, later = run.credentials("b"), run.records(run.credentials("a")), time.time() + 60.0
    b = run.records(credentials)
    assert not others.validate(signed(run.records(credentials, key=b"other"), "b", later, key=b"other"))
    assert not others.validate(signed(b, "b", time.time() - 1.0))
    again = msgpack.packb("leader") + msgpack.packb("a")  # in msgpack a key may come twice; the last one counts
    for times, valid in ((10, True), (1000, False)):
        pairs = again * times + msgpack.packb(said(later))[1:]
        item = Item(KEY, msgpack.packb("b"), b"\xde" + (times + len(said(later))).to_bytes(2, "big") + pairs, later)
        item.value = b.sign_value(item)
        assert others.validate(item) is valid


def test_another_authority_of_the_same_run_id_signs_nobody(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other", run.run_id)
    item = signed(other.records(other.credentials("b")), "b", time.time() + 60.0)
    assert other.records(other.credentials("a")).validate(item)
    assert not run.records(run.credentials("a")).validate(item)


def test_a_member_cannot_say_it_for_longer_than_allowed(run: Run) -> None:
    b, others = run.records(run.credentials("b")), run.records(run.credentials("a"))
    assert others.validate(signed(b, "b", time.time() + LONGEST_S - 5))
    assert not others.validate(signed(b, "b", time.time() + LONGEST_S + 5))


def test_who_is_evicted_says_nothing_any_more(run: Run) -> None:
    item = signed(run.records(run.credentials("b")), "b", time.time() + 60.0)
    assert not run.records(run.credentials("a"), evicted="b").validate(item)


def test_a_damaged_key_is_an_error_of_one_line(run: Run) -> None:
    key, certificate, _ = run.credentials("a")
    with pytest.raises(ConfigError, match=r"^peer.key, peer.pem or ca.pem is damaged"):
        run.records((key, certificate, b"no certificate"))


def test_who_looks_for_a_coordinator_takes_only_a_coordinators_word(tmp_path: Path) -> None:
    """A peer may be named as the coordinator is; its certificate says that it is a peer."""
    run, expires = Run(tmp_path / "run"), time.time() + 60.0
    private_key, certificate, ca = run.credentials("seeker")
    seeker = SignedRecords(run.run_id, KEY, ca, private_key, certificate, lambda peer_id: False, role="coordinator")
    peer = signed(run.records(run.credentials("coordinator")), "coordinator", expires)
    coordinator = signed(run.records(run.credentials("coordinator", "coordinator")), "coordinator", expires)
    assert seeker.read(peer) is None
    assert (read := seeker.read(coordinator)) is not None and read[0] == "coordinator"
    assert run.records(run.credentials("a")).read(coordinator) is None, "nor is a coordinator a member of a swarm"


def test_who_only_looks_reads_where_a_coordinator_redeems_invitations_and_signs_nothing(tmp_path: Path) -> None:
    run, other, expires = Run(tmp_path / "run"), Run(tmp_path / "other", "run-0"), time.time() + 60.0
    guest = SignedRecords(run.run_id, KEY, run.ca, b"", b"", lambda peer_id: False, role="coordinator")
    doors = ["127.0.0.1:7", "[::1]:7"]
    for made_by, value, believed in (
        (run, said(expires, enrol=doors), tuple(doors)),
        (run, said(expires), ()),
        (other, said(expires, enrol=doors), None),  # of the same run_id, by another authority
        (run, said(expires, enrol=["127.0.0.1"]), None),
        (run, said(expires, enrol="127.0.0.1:7"), None),
        (run, said(expires, enrol=[7]), None),
        (run, said(expires, enrol=doors * MOST_ADDRESSES), None),
        (run, said(expires, invitations=doors), None),
    ):
        item = signed(made_by.records(made_by.credentials("coordinator", "coordinator")), "coordinator", expires, value)
        read = guest.read(item)
        assert (read[1].enrol if read is not None else None) == believed
    with pytest.raises(LocalProtocolError, match="without a certificate of the run"):
        guest.sign_value(item)
