"""Whose keys count for an update that may have been merged before the record changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aggregator.swarm.enrolments import Enrolments, UnclearKeyError
from edit.council.record import Enrolled, Record, Update
from edit.errors import GoneError
from edit.trust.signatures import Signer, key_hash
from tests.support.council.audited import KEYS, record_of

PUBLIC = {peer_id: Signer(key).public_key for peer_id, key in KEYS.items()}
OLD, NEW, THIRD = (PUBLIC[each] for each in "qab")
GRANT = 4


def record(step: int, *, key: bytes = OLD, grant: int = GRANT, term: int = 1, out: bool = False) -> Record:
    """The record that names this outer step; q is enrolled for the key, and may be evicted."""
    one = record_of(q=Enrolled("2" * 32, key_hash(key)))
    parts = (replace(one.parts[0], grant=grant, outer_step=step),)
    return replace(one, parts=parts, term=term, evicted={"q": "late"} if out else {})


def update(step: int, grant: int = GRANT) -> Update:
    return Update(part=0, outer_step=step, grant=grant, id="0" * 64, base="1" * 64, digest="2" * 64, tokens=7)


def known(*records: Record) -> Enrolments:
    first, *others = records
    found = Enrolments.of(first)
    for each in others:
        found = found.taking(each)
    return found


@pytest.mark.parametrize(
    ("step", "grant", "counts"), [(4, GRANT, True), (5, GRANT, True), (6, GRANT, False), (5, GRANT + 1, False)]
)
def test_the_key_of_before_counts_up_to_the_next_outer_step_under_the_same_grant(step: int, grant: int, counts: bool) -> None:
    for changed in (known(record(1), record(4, key=NEW)), known(record(1), record(4, out=True))):
        assert changed.counts("q", OLD, update(step, grant)) is counts
    assert known(record(1), record(4, key=NEW)).counts("q", NEW, update(step, grant))


def test_a_key_that_nobody_was_enrolled_for_is_unclear_for_as_long_and_then_does_not_count() -> None:
    """A record in between, with this key, may not have been seen here."""
    changed = known(record(1), record(4, key=NEW))
    with pytest.raises(UnclearKeyError, match="this key of q"):
        changed.counts("q", THIRD, update(5))
    assert not changed.counts("q", THIRD, update(6))
    assert not changed.counts("p", THIRD, update(5)), "nothing has changed for p"


@pytest.mark.parametrize(("key", "out"), [(NEW, False), (OLD, True)], ids=["enrolled", "evicted"])
def test_after_a_start_and_under_another_leader_other_keys_are_unclear_until_the_next_outer_step(key: bytes, out: bool) -> None:
    """Also that of who was evicted long before: else an owner that lies could merge it once more with each leader."""
    for fresh in (
        known(record(4, key=key, out=out)),
        known(record(1, key=key, out=out), record(4, key=key, out=out, term=2)),
    ):
        with pytest.raises(UnclearKeyError):
            fresh.counts("q", OLD, update(5))
        assert not fresh.counts("q", OLD, update(6)) and not fresh.counts("q", OLD, update(5, GRANT + 1))
    seen = known(record(1), record(4, key=key, out=out), record(4, key=key, out=out, term=2))
    assert seen.counts("q", OLD, update(5)), "it has seen the change"


def test_of_who_is_not_enrolled_nothing_is_known() -> None:
    with pytest.raises(GoneError, match="the enrolment of x is not known here"):
        known(record(4)).counts("x", OLD, update(5))
