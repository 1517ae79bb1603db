"""Who leads: elections, leases, what a member that was away or is behind does."""

from __future__ import annotations

import pytest

from edit.council.events import Accepted, Ask, Tick, Vote
from edit.council.machine import Council, Role
from edit.council.record import Member, Saved
from tests.support.council.table import LEASE_S, Table


@pytest.mark.parametrize("voters", ["a", "ab", "abc", "abcd", "abcdefg"])
def test_one_leader_within_two_leases(voters: str) -> None:
    table = Table(voters)
    table.run(2 * LEASE_S)
    (leader,) = table.leaders
    assert all(council.leader == leader for council in table.councils.values())
    assert all(council.committed is not None and council.committed.term == 2 for council in table.councils.values())
    table.run(5 * LEASE_S)
    assert table.leaders == [leader] and table.record.term == 2, "it stays"


@pytest.mark.parametrize(("voters", "lost"), [("abc", "a"), ("abcd", "b"), ("abcd", "bc"), ("abcdefg", "bdf")])
def test_a_quorum_that_is_left_elects_another_leader(voters: str, lost: str) -> None:
    table = Table(voters)
    table.elect(lost[0])
    for peer_id in lost:
        table.kill(peer_id)
    table.run(0.8 * LEASE_S, step_s=0.01)
    assert len(table.leaders) == 1 and table.leaders[0] not in lost, "the connection broke: nobody waits for the lease"


@pytest.mark.parametrize(("voters", "lost"), [("abc", "ab"), ("abcd", "ab"), ("abcd", "abc"), ("abcdefg", "aceg")])
def test_a_minority_elects_nobody(voters: str, lost: str) -> None:
    table = Table(voters)
    table.elect(lost[0])
    for peer_id in lost:
        table.kill(peer_id)
    table.run(5 * LEASE_S)
    assert table.leaders == [] and {council.term for council in table.councils.values()} == {2}, "no term is used up"


def test_of_two_members_the_older_goes_on_alone_and_the_younger_does_not() -> None:
    table = Table("ab")
    table.elect("b")
    table.kill("b")
    table.run(2 * LEASE_S)
    assert table.leaders == ["a"]
    table.start("b")
    table.run(LEASE_S)
    table.kill("a")
    table.run(5 * LEASE_S)
    assert table.leaders == []


def test_a_silent_leader_is_replaced_after_its_lease_and_steps_down_by_itself() -> None:
    table = Table("abc")
    table.elect("a")
    table.cut = {"a"}
    table.run(1.9 * LEASE_S)
    assert len([peer_id for peer_id in table.leaders if peer_id != "a"]) == 1
    table.run(0.3 * LEASE_S)
    assert "a" not in table.leaders, "two leases without a quorum"
    table.cut = set()
    table.run(LEASE_S)
    assert len(table.leaders) == 1 and table.councils["a"].leader == table.leaders[0]


def test_a_candidate_that_is_behind_learns_the_term_and_does_not_ask_for_ever() -> None:
    table = Table("ab")
    assert table.say("b#1", "a", Ask(1, table.first.stamp, True)) == [Vote(1, False, True, 0.0)], "its own term"
    table.say("b#1", "a", Ask(9, table.first.stamp, False))
    assert table.councils["a"].term == 9
    table.kill("b")
    table.start("b")
    table.run(3 * LEASE_S)
    assert len(table.leaders) == 1 and table.record.term > 9


def test_a_member_whose_term_is_later_is_not_locked_out() -> None:
    table = Table("abc")
    table.elect("a")
    table.disks["c"] = Saved(incarnation=1, term=7, record=table.record)
    table.kill("c")
    table.start("c")
    table.run(3 * LEASE_S)
    assert table.record.term >= 7 and {council.leader for council in table.councils.values()} == {table.leaders[0]}


def test_a_member_that_accepts_no_connection_neither_leads_nor_owns() -> None:
    members = {"a": Member(incarnation=1), "b": Member(incarnation=1, reachable=False), "c": Member(incarnation=1)}
    table = Table("abc", owners="aac", members=members)
    table.elect("a")
    table.kill("a")
    table.run(3 * LEASE_S)
    assert table.leaders == ["c"], "b votes"
    assert {part.owner for part in table.record.parts} == {"c"}


def test_a_clock_that_jumps_costs_nothing_but_a_question() -> None:
    table = Table("abc")
    table.elect("a")
    term = table.record.term
    table.councils["b"].handle(Tick(), table.now + 3600)
    table.run(2 * LEASE_S, only="ac")
    assert table.leaders == ["a"] and table.record.term == term


def test_latencies_above_the_lease_make_it_longer() -> None:
    table = Table("abc")
    delayed: list[tuple[float, tuple[str, str, object]]] = []
    for _ in range(1000):  # 50 s, each message takes 1.5 of them
        table.now += 0.05
        for peer_id in "abc":
            table.handle(peer_id, Tick())
        delayed += [(table.now + 1.5 * LEASE_S, mail) for mail in table.mail]
        table.mail = [mail for due, mail in delayed if due <= table.now]  # type: ignore[misc]
        delayed = [each for each in delayed if each[0] > table.now]
        coming, table.mail = table.mail, []
        for sender, to, message in coming:
            table.say(sender, to, message)
    assert len(table.leaders) == 1 and table.councils[table.leaders[0]].committed is not None
    assert 20 * LEASE_S < table.record.lease_s <= 30 * LEASE_S, "8 round trips of 3 s"
    assert all(council.role is not Role.CANDIDATE for council in table.councils.values())


def with_late_answers(table: Table) -> Council:
    """b, cut off from its leader a and from c, whose answers to its trial took two leases; so its lease has grown."""
    table.elect("a")
    table.cut = {"a", "c"}
    table.run(2 * LEASE_S)
    b = table.councils["b"]
    assert b.role is Role.TRIAL and b.leader == ""
    for peer_id in "ac":
        table.say(f"{peer_id}#1", "b", Vote(b.term, False, True, echo=table.now - 2 * LEASE_S))
    assert b.lease_s > 10 * LEASE_S and b.leader == ""
    return b


def test_answers_that_took_long_do_not_bring_a_lost_leader_back() -> None:
    """A member that was stopped answers what it was asked meanwhile: that makes the lease longer, and no leader heard."""
    table = Table("abc")
    b = with_late_answers(table)
    (vote,) = table.say("c#1", "b", Ask(b.term + 1, table.record.stamp, True, table.now))
    assert isinstance(vote, Vote) and vote.granted


def test_what_a_follower_measured_while_a_member_was_stopped_counts_until_a_record_is_committed() -> None:
    """Else it refuses trials for eight times as long as the other was stopped, whoever leads meanwhile."""
    table = Table("abc")
    b = with_late_answers(table)
    table.cut = set()
    table.elect("c")
    assert b.leader == "c" and b.lease_s == table.record.lease_s == LEASE_S
    table.cut = {"c"}
    table.run(2.5 * LEASE_S)
    assert len(table.leaders) == 1 and table.leaders[0] in "ab"


def test_answers_to_what_was_said_before_a_standstill_make_no_lease_longer() -> None:
    """A leader that stood still for 14 s, and died then, would be missed for a minute."""
    table = Table("abc")
    a = table.elect("a")
    table.run(2 * LEASE_S)
    stood, table.now = table.now, table.now + 14 * LEASE_S
    for number in range(10):
        for peer_id in "bc":
            council = table.councils[peer_id]
            assert council.record is not None
            sent = stood + 0.001 * number
            table.say(f"{peer_id}#1", "a", Accepted(a.term, council.record.stamp, tuple(table.states[peer_id]), sent))
    assert a.lease_s == table.record.lease_s == LEASE_S
