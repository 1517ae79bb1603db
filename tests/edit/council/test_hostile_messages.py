"""Whatever a member says, no machine fails, and nothing that a quorum agreed on is lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from edit.council import events as ev
from edit.council.record import MOST_COUNT, Member, Part, PartState, Phase, Record, Stamp, Update
from tests.support.council.table import LEASE_S, Table, start_digest


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


@pytest.mark.parametrize("seed", range(20))
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
