"""Who is a member, and who votes: joining, leaving, eviction, lives, lineages, orders; and messages that do not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edit.council import events as ev
from edit.council.machine import FAR, Council
from edit.council.record import (
    MOST_COUNT,
    MOST_HOLDERS,
    MOST_ROOTS,
    MOST_UNKNOWN,
    Enrolled,
    Member,
    PartState,
    Phase,
    Record,
    Root,
    Saved,
    Stamp,
)
from tests.support.council.table import LEASE_S, Table, start_digest


def versions_of(table: Table, peer_id: str) -> list[Record]:
    return [committed.record for committed in table.done(ev.Committed, peer_id)]


def test_a_peer_that_joins_is_a_member_then_has_all_parts_then_votes() -> None:
    table = Table("a", owners="aa", blank="b")
    table.run(3 * LEASE_S)
    assert table.record.voters == ("a#1", "b#1") and table.steps() == {"a": 0, "b": 0}
    seen = [(len(r.members), len(r.voters), len(r.before)) for r in versions_of(table, "a")]
    assert sorted({*seen}, key=seen.index) == [(1, 1, 0), (2, 1, 0), (2, 2, 1), (2, 2, 0)]


def test_a_member_without_the_parts_does_not_vote() -> None:
    table = Table("a", blank="b")
    table.works = False
    table.run(3 * LEASE_S)
    assert {*table.record.members} == {"a", "b"} and table.record.voters == ("a#1",)


def test_at_most_seven_vote() -> None:
    table = Table("a", learners="bcdefghi")
    table.run(3 * LEASE_S)
    assert len(table.record.voters) == 7 and len(table.record.members) == 9 and table.record.before == ()


def test_the_voters_change_only_when_a_quorum_of_the_new_ones_is_up_to_date() -> None:
    table = Table("a", learners="bc")
    table.cut = {"b", "c"}
    table.run(3 * LEASE_S)
    assert table.record.voters == ("a#1",), "nobody is there"
    table.cut = set()
    table.run(LEASE_S)
    assert len(table.record.voters) == 3


def test_a_voter_that_is_silent_for_long_votes_no_more_and_comes_back_at_the_end() -> None:
    table = Table("abc")
    table.elect("a")
    table.cut = {"b"}
    table.run(11 * LEASE_S)
    assert table.record.voters == ("a#1", "c#1") and "b" in table.record.members
    table.cut = set()
    table.run(2 * LEASE_S)
    assert table.record.voters == ("a#1", "c#1", "b#1")


def test_a_member_that_lost_its_disk_comes_back_in_another_life() -> None:
    table = Table("abc")
    table.elect("a")
    table.kill("c")
    table.wipe("c", 2)
    table.start("c")
    table.run(3 * LEASE_S)
    assert table.record.voters == ("a#1", "b#1", "c#2") and {*table.steps().values()} == {0}


def test_what_a_life_before_had_does_not_count_for_the_next() -> None:
    table = Table("a", learners="b")
    table.works = False
    table.elect("a")  # a learner that has everything would vote next
    table.wipe("b", 2)
    table.say("b#1", "a", ev.Accepted(table.record.term, Stamp(1, 0, 0), (PartState(0, start_digest(0)),)))
    table.say("b#2", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=2)))
    table.handle("a", ev.Tick())
    assert "b#2" not in table.record.electors


def test_an_older_life_is_refused() -> None:
    table = Table("ab")
    table.elect("a")
    table.kill("b")
    table.wipe("b", 5)
    table.start("b")
    table.run(2 * LEASE_S)
    before = table.record
    table.say("b#4", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=4)))
    table.run(LEASE_S / 2)
    assert before.voters == ("a#1", "b#5") and table.record.members == before.members
    assert any("older folder" in notice.text for notice in table.done(ev.Noticed, "a"))


def test_a_life_is_what_the_shell_says_and_not_the_message() -> None:
    table = Table("abc")
    table.elect("a")
    table.say("c#1", "a", ev.Hello(table.record.stamp, Member(incarnation=9)))
    table.run(LEASE_S)
    assert table.record.members["c"].incarnation == 1


def test_a_member_that_moves_is_found_at_its_new_address() -> None:
    table = Table("ab")
    table.elect("a")
    table.say("b#1", "a", ev.Hello(table.record.stamp, Member(incarnation=1, addresses=("elsewhere:1",))))
    table.deliver()
    assert table.record.members["b"].addresses == ("elsewhere:1",)
    table.handle("b", ev.Here(Member(incarnation=1, addresses=("there:1",))))
    table.run(LEASE_S)
    assert table.record.members["b"].addresses == ("there:1",)


@pytest.mark.parametrize("voters", ["a", "abc"])
def test_a_leader_that_is_elsewhere_says_so_in_the_record(voters: str) -> None:
    table = Table(voters)
    table.elect("a")
    table.handle("a", ev.Here(Member(incarnation=1, addresses=("there:1",))))
    table.run(LEASE_S)
    assert table.leaders == ["a"] and table.record.members["a"].addresses == ("there:1",)
    stamp = table.record.stamp
    table.run(3 * LEASE_S)
    assert table.record.stamp == stamp, "once is enough"


def test_a_member_that_was_away_while_all_voters_changed_learns_of_them() -> None:
    table = Table("abc", blank="de")
    table.elect("a")
    table.kill("c")
    table.run(12 * LEASE_S)
    assert {*table.record.voters} == {"a#1", "b#1", "d#1", "e#1"}
    for peer_id in "ab":
        table.handle(table.leaders[0], ev.Evict(peer_id, "gone"))
        table.run(2 * LEASE_S)
        table.kill(peer_id)
        table.run(3 * LEASE_S)
    assert {*table.record.members} == {"c", "d", "e"}
    table.start("c")
    table.run(4 * LEASE_S)
    assert "c#1" in table.record.voters and len(table.leaders) == 1


# -- leaving, eviction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", "abc")
def test_a_member_leaves_within_three_leases_and_hands_its_parts_over(leaver: str) -> None:
    table = Table("abc", owners="abc")
    table.elect("a")
    table.handle(leaver, ev.LeaveAsked())
    table.run(2 * LEASE_S)
    assert leaver not in table.record.members and leaver not in {part.owner for part in table.record.parts}
    assert len(table.record.voters) == 2 and table.record.before == ()
    last = versions_of(table, leaver)[-1]
    assert leaver not in last.members and f"{leaver}#1" not in last.electors, "it knows, and can end"
    table.kill(leaver)
    table.run(3 * LEASE_S)
    assert len(table.leaders) == 1


def test_the_last_member_does_not_leave() -> None:
    table = Table("a")
    table.elect("a")
    table.handle("a", ev.LeaveAsked())
    table.run(2 * LEASE_S)
    assert {*table.record.members} == {"a"}


def test_when_all_leave_at_once_nobody_is_voted_out_and_all_come_back() -> None:
    """Else the swarm would hang on whoever was the last, and the others could not go on without it."""
    table = Table("abc", owners="abc")
    table.elect("a")
    table.run(LEASE_S)
    before = table.record
    for peer_id in "abc":
        table.handle(peer_id, ev.LeaveAsked())
    table.run(2 * LEASE_S)
    assert table.record.members == before.members and table.record.voters == before.voters
    for peer_id in "abc":
        table.kill(peer_id)
    table.start("b")
    table.start("c")
    table.run(3 * LEASE_S)
    assert len(table.leaders) == 1


def test_two_of_three_leave_and_one_that_left_comes_back_with_its_folder() -> None:
    table = Table("abc", owners="abc")
    table.elect("a")
    for peer_id in "ab":
        table.handle(peer_id, ev.LeaveAsked())
    table.run(4 * LEASE_S)
    assert {*table.record.members} == {"c"} and table.leaders == ["c"]
    for peer_id in "ab":
        table.kill(peer_id)
    table.start("b")
    table.run(4 * LEASE_S)
    assert table.record.voters == ("c#1", "b#1") and table.record.before == ()


def test_an_evicted_member_gets_nothing_any_more_and_cannot_come_back() -> None:
    table = Table("abc", owners="abc")
    table.elect("a")
    table.handle("a", ev.Evict("b", "it lied"))
    table.run(LEASE_S)
    assert table.record.evicted == {"b": "it lied"} and "b" not in {part.owner for part in table.record.parts}
    assert table.record.voters == ("a#1", "c#1")
    for message in (
        ev.Hello(table.record.stamp, Member(incarnation=1)),
        ev.Ask(99, Stamp(1, 98, 1), False),
        ev.Ask(99, Stamp(1, 98, 1), True),
        ev.Leave(),
    ):
        assert table.say("b#1", "a", message) == [] == table.say("b#1", "c", message)
    assert table.say("b#2", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=2))) == []
    table.run(2 * LEASE_S)
    assert "b" not in table.record.members and table.record.term < 99


@pytest.mark.parametrize("evicted", "ab")
def test_a_leader_is_evicted_like_any_other(evicted: str) -> None:
    table = Table("abc")
    table.elect("a")
    table.handle("a", ev.Evict(evicted, "an order"))
    table.run(3 * LEASE_S)
    assert evicted not in table.record.members and len([p for p in table.leaders if p != evicted]) == 1


def test_who_was_enrolled_and_is_no_member_can_be_evicted_an_observer() -> None:
    table = Table("a", roots=(Root("b2xk"),), enrolled={p: claim(1).enrolled for p in ("a", "eye")})
    table.elect("a")
    table.run(LEASE_S)
    table.handle("a", ev.Evict("eye", "looked too long"))
    table.run(LEASE_S)
    assert table.record.evicted == {"eye": "looked too long"} and table.record.members.keys() == {"a"}
    assert table.handle("a", ev.Evict("a", "alone")) == [ev.Refused("a is the only member")]


def test_a_name_that_was_only_invited_can_be_evicted_and_these_leave_room_for_members() -> None:
    before = {f"x{i}": "gone" for i in range(MOST_UNKNOWN - 1)}
    enrolled = {p: claim(1).enrolled for p in ("a", "eye")}
    table = Table("a", roots=(Root("b2xk"),), enrolled=enrolled, holders=("a",), evicted=before)
    table.elect("a")
    table.run(LEASE_S)
    table.handle("a", ev.Evict("new", "its invitation leaked"))
    table.run(LEASE_S)
    assert table.record.evicted["new"] == "its invitation leaked"
    table.handle("a", ev.Claim("new", claim(2).enrolled))
    table.run(LEASE_S)
    assert "new" not in table.record.enrolled
    (refused,) = table.handle("a", ev.Evict("z", "who?"))
    assert isinstance(refused, ev.Refused) and refused.reason.startswith(f"{MOST_UNKNOWN} names that nobody had were evicted")
    table.handle("a", ev.Evict("eye", "looked too long"))
    table.run(LEASE_S)
    assert "eye" in table.record.evicted and len(table.record.evicted) == MOST_UNKNOWN + 1


def test_orders_are_given_to_the_leader() -> None:
    table = Table("abc")
    table.elect("a")
    assert table.handle("b", ev.SetPhase(Phase.PAUSED)) == [ev.Refused("ask the leader, a")]
    table.handle("a", ev.Evict("b", "it lied"))
    table.handle("a", ev.Evict("b", "again"))
    table.run(LEASE_S)
    assert table.record.evicted == {"b": "it lied"}
    table.handle("a", ev.Evict("c", "it too"))
    table.run(LEASE_S)
    assert table.handle("a", ev.Evict("a", "the last")) == [ev.Refused("a is the only member")]


@pytest.mark.parametrize("phase", [Phase.PAUSED, Phase.DRAINING])
def test_a_phase_is_a_version_that_every_member_gets(phase: Phase) -> None:
    table = Table("abc")
    table.elect("a")
    table.handle("a", ev.SetPhase(phase))
    table.run(LEASE_S)
    assert {council.committed.phase for council in table.councils.values() if council.committed} == {phase}


def test_the_run_is_finished_when_all_engines_have_ended_and_goes_on_when_it_is_resumed() -> None:
    table = Table("abc", owners="ab")
    table.elect("c")
    table.run(LEASE_S / 2)
    table.handle("c", ev.SetPhase(Phase.DRAINING))
    table.run(LEASE_S / 2)
    for i, part in enumerate(table.record.parts):
        assert table.record.phase is Phase.DRAINING
        table.handle(part.owner, ev.Ended(i, part.grant))
        table.mail.clear()  # lost, and said again
        table.run(LEASE_S / 2)
    assert table.record.phase is Phase.FINISHED
    first = table.record.parts[0]
    table.make(first.owner)
    table.run(LEASE_S / 2)
    assert table.record.parts[0].outer_step == 0, "no outer step after the end"
    table.handle("c", ev.SetPhase(Phase.RUNNING))
    table.say(f"{first.owner}#1", "c", ev.Ended(0, first.grant))  # late
    table.run(LEASE_S)
    assert table.record.phase is Phase.RUNNING and table.record.parts[0].grant > first.grant
    table.make(table.record.parts[0].owner)
    table.run(LEASE_S / 2)
    assert table.record.parts[0].outer_step == 1


# -- lineages --------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_paused_and_draining_it_again_changes_nothing() -> None:
    table = Table("a", owners="a")
    table.elect("a")
    table.run(LEASE_S / 2)
    (part,) = table.record.parts
    table.handle("a", ev.Ended(0, part.grant))
    assert table.record.phase is Phase.FINISHED
    assert table.handle("a", ev.SetPhase(Phase.PAUSED)) == [ev.Refused("the run is finished")]
    assert table.handle("a", ev.SetPhase(Phase.DRAINING)) == []
    table.run(LEASE_S)
    assert table.record.phase is Phase.FINISHED


@pytest.mark.parametrize(("paused", "offered", "last_step"), [(False, False, 2), (True, False, 1), (True, True, 2)])
def test_all_parts_of_a_run_that_drains_end_at_one_outer_step(paused: bool, offered: bool, last_step: int) -> None:
    """It is the step after that of the part that is furthest; while the run is paused, only if its update is on the way."""
    table = Table("abc", owners="ab")
    table.elect("c")
    table.run(LEASE_S / 2)
    table.make("a")
    table.run(LEASE_S)
    assert [part.outer_step for part in table.record.parts] == [1, 0] and table.record.last_step == 0
    if paused:
        table.handle("c", ev.SetPhase(Phase.PAUSED))
        table.run(LEASE_S)
    if offered:
        table.make("a")
    table.handle("c", ev.SetPhase(Phase.DRAINING))
    table.run(LEASE_S)
    assert table.record.phase is Phase.DRAINING and table.record.last_step == last_step
    table.handle("c", ev.SetPhase(Phase.DRAINING))
    table.run(LEASE_S)
    assert table.record.last_step == last_step, "again is as once"
    table.handle("c", ev.SetPhase(Phase.RUNNING))
    table.run(LEASE_S)
    assert table.record.last_step == 0


def test_a_run_that_drains_is_not_paused_and_goes_on_when_it_is_resumed() -> None:
    table = Table("abc", owners="ab")
    table.elect("c")
    table.run(LEASE_S / 2)
    table.handle("c", ev.SetPhase(Phase.DRAINING))
    (refused,) = table.handle("c", ev.SetPhase(Phase.PAUSED))
    assert isinstance(refused, ev.Refused) and refused.reason.startswith("the run drains")
    table.run(LEASE_S / 2)
    first = table.record.parts[0]
    table.handle(first.owner, ev.Ended(0, first.grant))
    (again,) = table.handle("c", ev.SetPhase(Phase.PAUSED))
    assert again == refused
    table.run(LEASE_S / 2)
    assert table.record.phase is Phase.DRAINING, "the other part is still to end"
    table.handle("c", ev.SetPhase(Phase.RUNNING))
    table.run(LEASE_S)
    second = table.record.parts[1]
    table.handle(second.owner, ev.Ended(1, second.grant))
    table.run(LEASE_S)
    assert table.record.phase is Phase.RUNNING and table.record.parts[0].grant > first.grant


def test_a_survivor_recovers_and_the_others_join_anew() -> None:
    table = Table("abc")
    table.elect("a")
    table.kill("a")
    table.kill("b")
    table.run(3 * LEASE_S)
    assert table.leaders == []
    del table.councils["c"]
    table.disks["c"] = table.disks["c"].recovered("c", table.states["c"])
    table.start("c")
    table.start("b")  # of the old lineage
    table.run(3 * LEASE_S)
    assert table.leaders == ["c"] and {*table.record.members} == {"c"} and table.record.lineage == 2
    assert len([notice for notice in table.done(ev.Noticed, "c") if "joins anew" in notice.text]) == 1
    told = [notice.text for notice in table.done(ev.Noticed, "b") if "recovered" in notice.text]
    assert told == [
        "c says that the swarm was recovered: it is of lineage 2, this member of 1, and must join anew (edit-peer swarm rejoin)"
    ], "it says why nobody lets it in, once"
    table.kill("b")
    table.wipe("b", 2)
    table.start("b")
    table.run(3 * LEASE_S)
    assert table.record.voters == ("c#1", "b#2")


def first_record_of(table: Table, **changes: Any) -> Council:
    """Let m, which lies and is then gone, be the first that a new member d hears: it says that it leads."""
    table.elect("a")
    table.run(LEASE_S / 2)
    record = table.record
    false = replace(record, **{"members": {**record.members, "d": Member(incarnation=1)}} | changes)
    table.kill("m")
    table.cut.add("m")
    table.disks["d"], table.states["d"] = Saved(incarnation=1), []
    table.start("d")
    table.mail.clear()
    table.say("m#1", "d", ev.Append(false.stamp, Stamp(0, 0, 0), false))
    table.run(10 * LEASE_S)
    return table.councils["d"]


@pytest.mark.parametrize("changes", [{"lineage": MOST_COUNT}, {"term": MOST_COUNT}, {"version": MOST_COUNT}])
def test_a_new_member_takes_no_record_whose_counts_cannot_grow(changes: dict[str, int]) -> None:
    assert first_record_of(table := Table("abc", learners="m"), **changes).leader == "a"
    assert "d#1" in table.record.voters


def test_a_new_member_takes_no_news_of_one_that_does_not_lead() -> None:
    table = Table("abc", blank="d")
    record = table.record
    table.say("b#1", "d", ev.News(replace(record, members={**record.members, "d": Member(incarnation=1)})))
    assert table.councils["d"].record is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lineage": 2}, "a is of lineage 1, not 2: it joins anew, or, where nobody recovered the swarm, this member does"),
        ({"term": 4 * FAR}, "a leads in term 2, this member is in 4194304, as one that lied has said: it joins anew"),
        ({"term": 1, "config_hash": "0" * 64}, "a leads with a record that cannot be of this run: one of the two joins anew"),
    ],
)
def test_a_new_member_that_was_let_in_by_one_that_lied_says_so_once(changes: dict[str, Any], text: str) -> None:
    table = Table("abc", learners="m")
    assert first_record_of(table, **changes).committed is None
    assert len([notice for notice in table.done(ev.Noticed, "d") if notice.text.startswith(text)]) == 1
    assert table.leaders == ["a"]
    table.kill("d")
    table.wipe("d", 2)
    table.start("d")
    table.run(3 * LEASE_S)
    assert "d#2" in table.record.voters, "it joins anew"


def test_messages_of_another_lineage_do_not_count() -> None:
    table = Table("abc")
    table.elect("a")
    other = Stamp(2, table.record.term, 99)
    table.say("b#1", "c", ev.Append(other, other))
    table.say("b#1", "a", ev.Accepted(table.record.term, other, ()))
    assert table.say("b#1", "c", ev.Ask(9, other, False)) == []
    assert table.councils["c"].leader == "a"


# -- messages that do not count --------------------------------------------------------------------------------------------


def test_a_stranger_gets_nothing() -> None:
    table = Table("abc")
    table.elect("a")
    table.cut = {"a"}
    table.run(1.1 * LEASE_S, only="")
    before = table.record
    stamp = Stamp(1, 99, 1)
    for message in (ev.Ask(99, stamp, True), ev.Ask(99, stamp, False), ev.Append(stamp, stamp), ev.Accepted(99, stamp, ())):
        for stranger in ("z#1", "b#2"):
            assert table.say(stranger, "c", message) == []
    assert table.record == before and table.councils["c"].term == before.term


@pytest.mark.parametrize("term", [FAR + 10, MOST_COUNT])
def test_a_member_that_lies_about_terms_does_not_use_them_up(term: int) -> None:
    table = Table("abc")
    table.elect("a")
    stamp = Stamp(1, term, 1)
    for message in (ev.Append(stamp, stamp), ev.Accepted(term, stamp, ()), ev.Vote(term, False, True)):
        for peer_id in "ac":
            table.say("b#1", peer_id, message)
    assert {council.term for council in table.councils.values()} == {2}


@pytest.mark.parametrize("with_a_vote", [False, True])
@pytest.mark.parametrize("message", ["Append", "Ask", "Accepted"])
def test_members_that_one_that_lied_has_parted_by_terms_come_together(message: str, with_a_vote: bool) -> None:
    table = Table("abcd" if with_a_vote else "abc", learners="" if with_a_vote else "d", owners="ab")
    table.elect("a")
    table.run(LEASE_S)
    for peer_id, steps in (("b", 8), ("c", 4)):
        for step in range(1, steps + 1):
            stamp = Stamp(1, 2 + step * FAR, 1)
            said = {
                "Append": ev.Append(stamp, stamp),
                "Ask": ev.Ask(stamp.term, stamp, False),
                "Accepted": ev.Accepted(stamp.term, stamp, ()),
            }
            if message == "Ask":
                table.councils[peer_id]._leader_at = 0.0  # hears no leader
            table.say("d#1", peer_id, said[message])
    table.kill("d")
    table.cut.add("d")
    table.mail.clear()
    assert [council.term // FAR for council in table.councils.values()] == [0, 8, 4]
    table.run(8 * LEASE_S)
    assert len(table.leaders) == 1
    table.make(table.record.parts[0].owner)
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 1


def test_one_leader_is_followed_in_a_term() -> None:
    table = Table("abc")
    table.elect("a")
    false = replace(table.record, version=99, phase=Phase.FINISHED)
    for peer_id in "ac":
        assert table.say("b#1", peer_id, ev.Append(false.stamp, false.stamp, false)) == []
        assert any("b says that it leads in term 2, but a does" in each.text for each in table.done(ev.Noticed, peer_id))
    assert table.record.version < 99 and table.leaders == ["a"]


def test_a_blank_member_takes_the_record_of_its_own_run_only() -> None:
    table = Table("a", blank="b", run_id="other")
    table.run(2 * LEASE_S)
    assert "b" in table.record.members and table.councils["b"].record is None


def test_a_member_that_lies_about_round_trips_does_not_stretch_the_lease() -> None:
    table = Table("abc")
    table.elect("a")
    for _ in range(20):
        table.run(LEASE_S / 4)
        for echo in (table.now - 30, float("nan"), float("-inf"), table.now + 30):
            table.say("b#1", "a", ev.Accepted(table.record.term, table.record.stamp, (), echo))
    assert table.record.lease_s == LEASE_S


def test_a_member_that_claims_states_it_cannot_have_is_no_harm_to_the_others() -> None:
    table = Table("abc")
    table.elect("a")
    states = tuple(PartState(10**6, start_digest(9)) for _ in range(1000))
    table.say("b#1", "a", ev.Accepted(table.record.term, table.record.stamp, states))
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 0 and table.leaders == ["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ev.Ask(-1, Stamp(1, 1, 1), True),
        lambda: ev.Ask(MOST_COUNT + 1, Stamp(1, 1, 1), True),
        lambda: ev.Vote(1.5, True, True),  # type: ignore[arg-type]
        lambda: ev.Append(Stamp(1, 1, 1), Stamp(1, 1, 2)),
        lambda: ev.Append(Stamp(1, 1, -1), Stamp(0, 0, 0)),
        lambda: ev.Append(Stamp(1, 1, 2), Stamp(0, 0, 0), Table("a").first),
        lambda: ev.Accepted(1, Stamp(1, 1, 1), (PartState(),) * 1025),
        lambda: ev.Release(0, -1, "x", False),
        lambda: ev.Release(0, 1, "\x1b", False),
        lambda: ev.Ended(-1, 0),
        lambda: ev.Vote(1, True, True, "now"),  # type: ignore[arg-type]
        lambda: ev.Evict("a", "\x1b"),
    ],
)
def test_messages_with_values_out_of_bounds_cannot_be_made(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


# -- who lets others in (rule 16) ------------------------------------------------------------------------------------------


def claim(number: int, key: str = "aa", peer_id: str = "new") -> ev.Claim:
    return ev.Claim(peer_id, Enrolled(f"{number:032x}", key * 32))


@pytest.mark.parametrize("first", ["b", "c"])
def test_an_invitation_that_two_holders_redeem_at_once_is_used_for_one_key(first: str) -> None:
    """Both claim it before either hears of the other; the leader's first is the one that all have, in whatever order."""
    table = Table("abc", holders=("b", "c"))
    table.elect("a")
    table.run(LEASE_S)
    for holder in (first, *{"b", "c"} - {first}):
        table.handle(holder, claim(1, "bb" if holder == "b" else "cc"))
    table.deliver()
    table.run(LEASE_S)
    for council in table.councils.values():
        assert council.committed is not None
        assert council.committed.enrolled == {"new": Enrolled(f"{1:032x}", first * 64)}


def test_without_a_quorum_no_invitation_is_used() -> None:
    table = Table("abc", holders=("a",))
    table.elect("a")
    table.run(LEASE_S)
    table.cut = {"b", "c"}
    table.handle("a", claim(1))
    table.run(5 * LEASE_S)
    committed = table.councils["a"].committed
    assert committed is not None and not committed.enrolled
    table.cut = set()
    table.run(3 * LEASE_S)
    table.handle("a", claim(1))
    table.run(LEASE_S)
    assert table.record.enrolled == {"new": claim(1).enrolled}


def test_of_two_invitations_for_one_name_the_later_counts() -> None:
    table = Table("abc", holders=("a",))
    table.elect("a")
    for made in (claim(2), claim(3, "bb"), claim(2, "cc"), claim(1, "dd")):
        table.handle("a", made)
        table.run(LEASE_S)
    assert table.record.enrolled == {"new": claim(3, "bb").enrolled}


@pytest.mark.parametrize("key", ["bb", "aa"], ids=["another key", "the same key"])
def test_a_later_invitation_for_a_member_ends_its_life_and_lets_an_earlier_clock_in(key: str) -> None:
    """The same key: a folder that was made again, after its clock had been ahead."""
    where = {p: Member(incarnation=1, addresses=(f"{p}:1",)) for p in "abc"}
    table = Table("abc", holders=("a",), members=where, enrolled={p: claim(1).enrolled for p in "abc"})
    table.elect("a")
    table.kill("c")
    table.handle("a", claim(2, key, "c"))
    table.run(LEASE_S)
    over = table.record.members["c"]
    assert table.record.voters == ("a#1", "b#1") and not over.reachable and not over.addresses

    def hello(incarnation: int, shown: str) -> None:
        message = ev.Hello(Stamp(0, 0, 0), Member(incarnation=incarnation))
        table.handle("a", ev.Received(f"c#{incarnation}", message, shown))
        table.run(LEASE_S)

    hello(9, "cc" * 32)
    assert table.record.members["c"] == over, "a machine with another key"
    hello(1, key * 32)
    assert table.record.members["c"] == Member(incarnation=1)


def test_an_earlier_machine_does_not_come_back_while_the_claim_is_on_its_way() -> None:
    table = Table("abc", holders=("a",), enrolled={p: claim(1).enrolled for p in "abc"})
    table.elect("a")
    table.run(LEASE_S)
    table.cut = {"c"}
    table.handle("a", claim(2, "bb", "c"))
    table.handle("a", ev.Received("c#1", ev.Hello(Stamp(0, 0, 0), Member(incarnation=1)), "aa" * 32))
    table.run(LEASE_S)
    assert table.record.members["c"].incarnation == 0 and "c#1" not in table.record.names


def test_who_is_no_holder_lets_nobody_in_and_nobody_lets_in_who_was_evicted() -> None:
    table = Table("abc", holders=("a",), evicted={"old": "it lied"})
    table.elect("a")
    table.run(LEASE_S)
    table.handle("b", claim(1))
    table.say("c#1", "a", claim(1))
    table.handle("a", claim(1, peer_id="old"))
    table.run(LEASE_S)
    assert not table.record.enrolled


def test_the_record_has_a_holder_before_it_is_given_the_key_and_keeps_it_when_it_is_evicted() -> None:
    table = Table("abc", holders=("a",))
    table.elect("a")
    table.run(LEASE_S)
    for peer_id, why in (("z", "z is not a member"), ("b", "")):
        (*refused,) = [one.reason for one in table.handle("a", ev.Entrust(peer_id)) if isinstance(one, ev.Refused)]
        assert refused == ([why] if why else [])
    table.run(LEASE_S)
    assert table.record.holders == ("a", "b")
    table.handle("a", ev.Evict("b", "it lies"))
    table.run(LEASE_S)
    assert "b" not in table.record.members and table.record.holders == ("a", "b"), "it has the key"
    assert [one.reason for one in table.handle("c", ev.Entrust("c")) if isinstance(one, ev.Refused)] == ["ask the leader, a"]


def test_a_member_that_accepts_no_connections_or_is_one_too_many_is_given_no_key() -> None:
    table = Table("abc", holders=tuple(f"m{i}" for i in range(MOST_HOLDERS)))
    table.elect("a")
    table.run(LEASE_S)
    (refused,) = [one.reason for one in table.handle("a", ev.Entrust("b")) if isinstance(one, ev.Refused)]
    assert refused == f"{MOST_HOLDERS} members have the authority's key already"
    table = Table("abc", members={p: Member(incarnation=1, reachable=p != "b") for p in "abc"})
    table.elect("a")
    table.run(LEASE_S)
    (refused,) = [one.reason for one in table.handle("a", ev.Entrust("b")) if isinstance(one, ev.Refused)]
    assert refused == "b accepts no connections, and could let nobody in"


def test_another_authority_takes_the_place_of_one_until_all_members_have_its_certificates() -> None:
    old, new = Root("b2xk"), Root("bmV3", "c2lnbmVk")
    table = Table("abc", holders=("a", "b"), roots=(old,), enrolled={p: claim(1).enrolled for p in "abc"})
    table.elect("a")
    table.run(LEASE_S)
    table.handle("a", ev.Supersede(new, "b"))
    table.run(LEASE_S)
    assert table.record.roots == (old, new) and table.record.holders == ("b",)
    assert not table.handle("a", ev.Supersede(new, "b")) or table.record.roots == (old, new), "once"
    for peer_id in "abc":
        assert table.record.roots == (old, new), f"{peer_id} has no certificate of it"
        table.handle(peer_id, ev.Here(Member(incarnation=1, authority=new.name)))
        table.run(LEASE_S)
    assert table.record.roots == (new,)


def test_no_version_leaves_the_present_authority_for_one_that_a_replaced_one_endorsed() -> None:
    old, new, stolen = Root("b2xk"), Root("bmV3", "c2lnbmVk"), Root("c3RvbGVu", "c2lnbmVk")
    table = Table("abc", holders=("a", "b"), roots=(old,), enrolled={p: claim(1).enrolled for p in "abc"})
    table.elect("a")
    table.run(LEASE_S)
    table.handle("a", ev.Supersede(new, "b"))
    table.run(LEASE_S)
    for roots, taken in ((old, stolen), False), ((stolen,), False), ((new,), True):
        record = replace(table.record, version=table.record.version + 1, roots=roots)
        table.say("a#1", "c", ev.Append(record.stamp, table.record.stamp, record))
        assert (table.councils["c"].record == record) is taken


def test_no_authority_is_replaced_where_none_is_known_or_too_many_are() -> None:
    for roots, why in (
        ((), "the record does not say"),
        (tuple(Root(f"{i}A==") for i in range(MOST_ROOTS)), "4 authorities already"),
    ):
        table = Table("abc", roots=roots, enrolled={p: claim(1).enrolled for p in "abc"})
        table.elect("a")
        table.run(LEASE_S)
        (refused,) = [one.reason for one in table.handle("a", ev.Supersede(Root("bmV3"), "a")) if isinstance(one, ev.Refused)]
        assert why in refused and table.record.roots == roots


def test_who_was_not_enrolled_is_no_member_where_the_record_says_who_was() -> None:
    for roots, members in (((), {*"abz"}), ((Root("b2xk"),), {*"ab"})):
        table = Table("ab", roots=roots, enrolled={p: claim(1).enrolled for p in "ab"})
        table.elect("a")
        table.run(LEASE_S)
        table.say("z#1", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=1)))
        table.run(LEASE_S)
        assert {*table.record.members} == members


# -- whether this member is needed any more --------------------------------------------------------------------------------


def test_a_leader_is_settled_once_all_that_it_hears_have_the_record_and_what_it_names() -> None:
    table = Table("abc")
    a = table.councils["a"]
    assert not a.settled, "nothing is known to be committed"
    table.elect("a")
    table.run(LEASE_S)
    assert a.settled and table.councils["b"].settled
    table.make("a")
    table.deliver(lambda mail: mail[0] != "c#1")  # a and b are a quorum; what c has is not heard
    assert table.record.parts[0].outer_step == 1 and not a.settled and table.councils["b"].settled
    table.run(LEASE_S)
    assert table.steps() == dict.fromkeys("abc", 1) and a.settled


def test_a_leader_does_not_wait_for_who_is_silent_and_believes_a_member_about_itself_only() -> None:
    table = Table("abc")
    a = table.elect("a")
    table.run(LEASE_S)
    stamp, states = table.record.stamp, a.states
    table.say("b#1", "a", ev.Accepted(stamp.term, stamp, (PartState(7, start_digest(7)),)))
    assert not a.settled, "it says that it is elsewhere: wait for it"
    table.say("b#1", "a", ev.Accepted(stamp.term, stamp, ()))
    assert not a.settled, "fewer parts than there are say nothing new"
    table.say("b#1", "a", ev.Accepted(stamp.term, stamp, states))
    assert a.settled
    table.say("b#1", "a", ev.Accepted(stamp.term, Stamp(1, 0, 0), states))
    assert not a.settled, "of an older record"
    table.cut = {"b"}
    table.run(2 * LEASE_S)
    assert a.settled, "who is gone is not waited for"


def test_another_machine_under_a_name_is_let_in_whatever_its_clock_says() -> None:
    """The first one's clock was ahead, and its disk is gone."""
    table = Table("abc", holders=("a",))
    table.elect("a")
    table.handle("a", claim(1))
    table.run(LEASE_S)
    for number, incarnation in ((1, 9000), (2, 500)):
        table.handle("a", claim(number, "aa" if number == 1 else "bb"))
        table.run(LEASE_S)
        assert "new" not in table.record.members or table.record.members["new"].incarnation == 0
        table.say(f"new#{incarnation}", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=incarnation)))
        table.run(LEASE_S)
        assert table.record.members["new"].incarnation == incarnation
    table.say("new#400", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=400)))
    table.run(LEASE_S)
    assert table.record.members["new"].incarnation == 500
