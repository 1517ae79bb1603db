"""Whatever a member says, no machine fails, and nothing that a quorum agreed on is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from edit.council import events as ev
from edit.council.machine import FAR, FARTHER, NOBODY
from edit.council.record import MOST_COUNT, Member, Part, PartState, Phase, Record, Stamp, Update
from tests.support.council.table import LEASE_S, Table, start_digest
from tests.support.exhaustive import rarely


def lie(random: Random, table: Table) -> ev.Message:
    """A message with numbers that are small, true or enormous."""
    truth = table.record

    def number(true: int = 0) -> int:
        return random.choice((0, 1, true, true + 1, true + 2, 2**20 + true, MOST_COUNT))

    def stamp() -> Stamp:
        return Stamp(random.choice((1, 1, 1, 0, 2)), number(truth.term), number(truth.version))

    def update(part: int) -> Update:
        base, digest = start_digest(random.randrange(3)), start_digest(random.randrange(9))
        return Update(part, number(1), number(truth.parts[0].grant), digest, base, digest, number())

    def record() -> Record:
        found = stamp()
        parts = tuple(
            Part(owner="c", grant=number(), outer_step=number(), digest=start_digest(i))
            for i in range(random.choice((1, 2, 3)))
        )
        members = {peer_id: Member(incarnation=random.choice((1, 2))) for peer_id in random.choice(("abc", "c", "cz"))}
        voters = random.choice((truth.voters, ("c#1",), ("z#1", "c#1")))
        return Record(
            run_id=random.choice(("run", "other")),
            lineage=found.lineage,
            term=found.term,
            version=found.version,
            members=members,
            voters=voters,
            parts=parts,
            phase=random.choice(list(Phase)),
        )

    states = tuple(
        PartState(number(), start_digest(random.randrange(3)), random.choice((None, update(i))))
        for i in range(random.choice((0, 1, 2, 3)))
    )
    false = record()
    return random.choice(
        (
            ev.Hello(stamp(), Member(incarnation=random.choice((1, 2)))),
            ev.Ask(number(truth.term), stamp(), random.random() < 0.5, random.uniform(-1e9, 1e9)),
            ev.Vote(number(truth.term), random.random() < 0.5, random.random() < 0.5, random.uniform(-1e9, 1e9)),
            ev.Append(false.stamp, Stamp(0, 0, 0)),
            ev.Accepted(number(truth.term), random.choice((stamp(), truth.stamp)), states, table.now),
            ev.Release(number(), number(truth.parts[0].grant), "a reason", random.random() < 0.5),
            ev.Ended(number(), number(truth.parts[0].grant)),
        )
    )


@pytest.mark.parametrize("seed", rarely(range(20), kept=range(8)))
def test_a_member_that_says_anything_but_false_records_stops_nobody_for_good(seed: int) -> None:
    random, table = Random(seed), Table("abc", owners="ab")
    table.elect("a")
    table.run(LEASE_S / 2)
    for _ in range(200):
        table.say("c#1", random.choice("ab"), lie(random, table))
        for number in (0, 10**9):
            table.say("c#1", "b", ev.Stall(number, table.record.parts[0].grant, number, number == 0))
        if random.random() < 0.1:
            table.run(0.05)
    lies = table.record
    table.mail.clear()
    table.run(8 * LEASE_S)
    assert len(table.leaders) == 1 and table.record.stamp > lies.stamp
    part = table.record.parts[0]
    if table.record.phase is not Phase.FINISHED:
        table.make(part.owner)
        table.run(LEASE_S)
        assert table.record.parts[0].outer_step == part.outer_step + 1 == 1, "one member is no quorum"


@pytest.mark.parametrize("seed", range(5))
def test_a_stranger_that_says_anything_changes_nothing(seed: int) -> None:
    random, table = Random(seed), Table("abc", owners="ab")
    table.elect("a")
    table.run(LEASE_S / 2)
    before = table.record
    for _ in range(300):
        message = lie(random, table)
        if not isinstance(message, ev.Hello):
            assert table.say("z#1", random.choice("abc"), message) == []
    assert replace(table.record, version=before.version) == before


def part_of(**changes: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, parts=tuple(replace(part, **changes) for part in record.parts))


# What a record of a member that lies says, which is of the next version, or of the next term.
FALSE: dict[str, Callable[[Record], Record]] = {
    "a version": lambda record: replace(record, version=MOST_COUNT),
    "a version that is too far": lambda record: replace(record, version=record.version + FARTHER + 2),
    "a grant": part_of(grant=MOST_COUNT),
    "a grant that is too far": part_of(grant=2 * FAR),
    "an outer step": part_of(outer_step=MOST_COUNT),
    "other settings": lambda record: replace(record, config_hash="0" * 64),
    "another model": lambda record: replace(record, schema_hash="0" * 64),
    "a lineage": lambda record: replace(record, lineage=record.lineage + 1),
}


def false_record(table: Table, what: str, terms: int = 0) -> Record:
    record = table.record
    return FALSE[what](replace(record, term=record.term + terms, version=record.version + 1))


@pytest.mark.parametrize("what", [*FALSE, "voters", "an eviction", "a term"])
def test_news_counts_at_nobody_that_hears_a_leader_or_leads(what: str) -> None:
    table = Table("abc", learners="d", owners="ab")
    table.elect("a")
    table.run(LEASE_S / 2)
    before = table.record
    later = replace(before, version=before.version + 1)
    more: dict[str, Record] = {
        "voters": replace(later, voters=("d#1",)),
        "an eviction": replace(later, evicted={"b": "lied"}),
        "a term": replace(later, term=before.term + 1),
    }
    for liar, others in (("c#1", "ab"), ("d#1", "abc")):
        for to in others:
            news = ev.News(more.get(what) or false_record(table, what))
            effects = table.handle(to, ev.Received(liar, news))
            assert [effect for effect in effects if not isinstance(effect, ev.Noticed)] == []
    table.run(2 * LEASE_S)
    assert table.leaders == ["a"] and table.record == before


@pytest.mark.parametrize("what", FALSE)
@pytest.mark.parametrize("leads", [False, True])
def test_what_a_false_record_says_ends_nobody_and_is_gone_with_who_said_it(what: str, leads: bool) -> None:
    table = Table("abc", learners="d", owners="ab")
    table.elect("a")
    table.run(LEASE_S / 2)
    if leads:  # it says so itself
        false = false_record(table, what, terms=1)
        message: ev.Message = ev.Append(false.stamp, NOBODY, false)
    else:
        message = ev.News(false_record(table, what))
        table.cut = {"a", "b", "c"}
        table.run(3 * LEASE_S)  # nobody hears a leader
    for to in "abc":
        table.say("d#1", to, message)
    table.kill("d")
    table.cut = {"d"}
    for peer_id in "abc":
        table.kill(peer_id)
        table.start(peer_id)
    table.run(6 * LEASE_S)
    table.make(table.record.parts[0].owner)
    table.run(LEASE_S)
    record, first = table.record, table.first
    assert record.parts[0].outer_step == 1 and (record.lineage, record.config_hash, record.schema_hash) == (1, "", "")
    assert record.version < first.version + FARTHER and record.parts[0].grant < FAR


def test_who_was_away_takes_news_that_is_as_far_as_a_swarm_may_have_come() -> None:
    table = Table("abc", owners="ab")
    record = table.record
    parts = tuple(replace(part, grant=part.grant + FAR, outer_step=FARTHER) for part in record.parts)
    news = replace(record, term=record.term + FAR, version=record.version + FARTHER, parts=parts)
    table.say("b#1", "a", ev.News(news))
    assert table.councils["a"].record == news
