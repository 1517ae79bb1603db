"""Outer steps of parts: an owner that changes at each point of one, members that are behind, verifiers, damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edit.council import events as ev
from edit.council.machine import Role
from edit.council.record import Member, PartState
from edit.errors import LocalProtocolError
from tests.support.council.table import LEASE_S, VERIFY_S, Mail, Table, start_digest, update


def led(*, council_of: str = "abc", leader: str = "c", owners: str = "a") -> Table:
    """A table whose leader is not the owner, and whose engine serves the part."""
    table = Table(council_of, owners=owners)
    table.elect(leader)
    table.run(LEASE_S / 2)
    assert table.done(ev.Serve, owners[0]), "after a start the owner has released its grant, and got another"
    return table


def test_an_outer_step_is_committed_by_those_who_hold_it_and_adopted_by_all() -> None:
    table = led()
    made = table.make("a")
    assert table.steps() == {"a": 0, "b": 0, "c": 0}, "held, and not agreed on yet"
    table.deliver()
    assert table.steps() == {"a": 1, "b": 1, "c": 1}
    part = table.record.parts[0]
    assert (part.outer_step, part.update, part.digest) == (1, made.id, made.digest)
    assert {states[0].digest for states in table.states.values()} == {made.digest}


def test_the_leader_hears_at_once_that_an_outer_step_was_taken() -> None:
    """So that a member that was behind votes, and takes parts over, without waiting for a heartbeat."""
    table = Table("abc")
    table.elect("a")
    table.run(LEASE_S / 2)
    made = table.make(table.record.parts[0].owner)
    table.deliver(lambda mail: mail[1] != "c")
    table.works = False
    table.run(LEASE_S / 2)
    assert len(table.done(ev.Adopt, "c")) == 1 and table.record.parts[0].outer_step == 1
    (said,) = table.handle("c", ev.Applied(0, 1, made.digest))
    assert isinstance(said, ev.Send) and said.peer_id == "a"
    assert isinstance(said.message, ev.Accepted) and said.message.states == (PartState(1, made.digest),)
    table.deliver()
    known = table.councils["a"].known("c", table.now)
    assert known is not None and known.live and known.states == (PartState(1, made.digest),)


def test_one_grant_makes_one_update_to_an_outer_step() -> None:
    table = led()
    table.cut = {"b", "c"}
    first = table.make("a", content="one")
    second = update(0, 1, first.grant, first.base, "two")
    assert [type(effect) for effect in table.handle("a", ev.Made(second))] == [ev.Refused]
    table.cut = set()
    table.run(LEASE_S)
    assert table.record.parts[0].update == first.id


def test_an_owner_that_dies_before_its_offer_is_replaced_and_another_makes_the_step() -> None:
    table = led()
    grant = table.record.parts[0].grant
    table.kill("a")
    table.run(LEASE_S)
    part = table.record.parts[0]
    assert part.owner in "bc" and part.grant == grant + 1
    table.make(part.owner)
    table.deliver()
    assert table.steps() == {"b": 1, "c": 1}


def test_an_owner_that_dies_when_too_few_hold_its_update_loses_it() -> None:
    table = Table("abcde")
    table.elect("c")
    table.run(LEASE_S / 2)
    table.cut = {"c", "d", "e"}
    lost = table.make("a", content="lost")  # a and b hold it
    assert table.states["b"][0].held == lost
    table.cut = set()
    table.mail.clear()
    table.kill("a")
    table.run(LEASE_S)
    owner = table.record.parts[0].owner
    other = table.make(owner, content="other")
    table.deliver()
    assert table.record.parts[0].update == other.id and {*table.steps().values()} == {1}, "b let go of the older grant's"
    table.start("a")
    table.run(LEASE_S)
    assert table.states["a"][0] == PartState(1, other.digest), "what it held itself counts for nothing"


def test_an_owner_that_dies_when_a_quorum_holds_its_update_is_not_needed_any_more() -> None:
    table = led()
    made = table.make("a")
    del table.councils["a"]
    table.deliver(lambda mail: mail[0] != "a#1")
    for peer_id in "bc":
        table.handle(peer_id, ev.Disconnected("a"))
    table.run(LEASE_S)
    assert table.record.parts[0].update == made.id and table.steps() == {"b": 1, "c": 1}
    assert table.record.parts[0].owner in "bc"


def test_the_word_of_those_who_hold_it_may_be_lost_and_is_said_again() -> None:
    table = led()
    table.make("a")
    table.deliver(lambda mail: not isinstance(mail[2], ev.Accepted))
    assert {*table.steps().values()} == {0}
    table.run(LEASE_S / 2)
    assert {*table.steps().values()} == {1}


def test_a_leader_that_dies_before_the_commit_leaves_the_step_to_the_next() -> None:
    table = led()
    made = table.make("a")
    table.mail.clear()  # the leader hears of no holder but itself
    table.kill("c")
    table.run(2 * LEASE_S)
    assert table.record.parts[0].update == made.id and table.steps() == {"a": 1, "b": 1}


def test_a_leader_that_dies_after_the_commit_leaves_it_committed() -> None:
    table = led()
    made = table.make("a")
    table.deliver(lambda mail: not (isinstance(mail[2], ev.Append) and mail[2].committed == mail[2].stamp))
    assert table.steps() == {"a": 0, "b": 0, "c": 1}, "only the leader knows"
    table.kill("c")
    table.run(2 * LEASE_S)
    assert table.record.parts[0].update == made.id and table.steps() == {"a": 1, "b": 1}


def test_an_old_owner_that_wakes_up_is_refused() -> None:
    table = led()
    table.cut = {"a"}
    table.run(2 * LEASE_S)
    assert table.record.parts[0].owner != "a"
    stale = table.make("a", content="stale")
    assert table.states["a"][0].held == stale, "it does not know yet"
    table.cut = set()
    for peer_id in "bc":
        assert [type(e) for e in table.handle(peer_id, ev.Offered("a#1", stale))] == [ev.Refused]
    table.run(LEASE_S)
    assert table.done(ev.Cease, "a") and table.record.parts[0].outer_step == 0


def test_an_owner_that_is_restarted_does_not_go_on_with_its_grant() -> None:
    table = led()
    table.cut = {"c"}
    first = table.make("a", content="one")
    table.cut = set()
    table.mail.clear()
    del table.councils["a"]  # so quickly that nobody notices
    table.start("a")
    table.run(LEASE_S)
    assert table.record.parts[0].grant > first.grant
    assert [serve.grant for serve in table.done(ev.Serve)] == sorted({serve.grant for serve in table.done(ev.Serve)})


def test_a_member_that_missed_updates_fetches_from_another() -> None:
    table = led()
    table.cut = {"b"}
    for _ in range(3):
        table.make("a")
        table.deliver()
    assert table.steps() == {"a": 3, "b": 0, "c": 3}
    table.cut = set()
    table.run(LEASE_S)
    assert table.steps() == {"a": 3, "b": 3, "c": 3}
    assert all(not fetch.snapshot for fetch in table.done(ev.Fetch, "b"))


def test_a_fetch_that_fails_is_tried_elsewhere() -> None:
    table = led()
    table.cut = {"b"}
    table.make("a")
    table.deliver()
    table.works, table.cut = False, set()
    table.run(LEASE_S)
    for source in ("a", "c", "a"):
        (fetch,) = table.done(ev.Fetch, "b")
        assert fetch.source == source
        table.log.clear()
        table.handle("b", ev.Failed(0, fetch, "broken"))
        table.run(LEASE_S / 4)


def test_damage_is_mended_by_a_snapshot() -> None:
    table = led()
    table.make("a")
    table.deliver()
    table.states["b"][0] = PartState(1, start_digest(7))
    table.kill("b")
    table.start("b")
    table.run(LEASE_S)
    (fetch,) = table.done(ev.Fetch, "b")
    assert fetch.snapshot and table.states["b"][0] == table.states["a"][0]
    assert any("damaged" in notice.text for notice in table.done(ev.Noticed, "b"))


def test_a_member_whose_shell_finds_it_damaged_takes_a_snapshot() -> None:
    table = led()
    table.make("a")
    table.deliver()
    table.handle("b", ev.Damaged(0, 0, start_digest(7)))  # it has gone on meanwhile
    assert not table.done(ev.Fetch, "b")
    table.works = False
    table.handle("b", ev.Damaged(0, 1, start_digest(7)))
    (fetch,) = table.done(ev.Fetch, "b")
    assert fetch.snapshot and table.councils["b"].states[0] == PartState(1, start_digest(7))
    table.handle("b", ev.Damaged(0, 1, start_digest(6)))  # while it is mended
    table.handle("b", ev.Applied(0, 1, table.states["a"][0].digest))
    assert table.councils["b"].states[0] == table.states["a"][0]


def test_a_damaged_member_holds_no_update_of_the_others() -> None:
    table = led()
    table.kill("b")
    table.states["b"][0] = PartState(0, start_digest(7))
    table.works = False
    table.start("b")
    table.run(LEASE_S / 2)
    made = update(0, 1, table.record.parts[0].grant, start_digest(0))
    assert "differs" in table.councils["b"].why_refused("a#1", made)


def test_what_nobody_asked_for_is_a_bug_of_the_shell() -> None:
    table = led()
    with pytest.raises(LocalProtocolError):
        table.handle("b", ev.Applied(0, 5, start_digest(0)))
    with pytest.raises(LocalProtocolError):
        table.handle("b", ev.Held(update(0, 1, 1, start_digest(0))))


def test_an_update_that_cannot_be_written_costs_its_grant() -> None:
    table = led()
    table.works = False
    made = table.make("a")
    (hold,) = table.done(ev.Hold, "a")
    table.handle("a", ev.Failed(0, hold, "the disk is full"))
    table.works = True
    table.run(LEASE_S)
    assert table.record.parts[0].grant > made.grant


# -- verifiers -------------------------------------------------------------------------------------------------------------


def test_a_step_needs_its_verifiers() -> None:
    table = Table("abcde", verify=1)
    table.elect("e")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    assert verifier != part.owner
    table.works = False
    made = table.make(part.owner)
    for peer_id in {*"abcde"} - {verifier}:
        if peer_id != part.owner:
            table.handle(peer_id, ev.Offered(f"{part.owner}#1", made))
        table.handle(peer_id, ev.Held(made))
    table.deliver()
    assert table.record.parts[0].outer_step == 0, "four of five hold it, but not the one that computes it, too"
    table.handle(verifier, ev.Offered(f"{part.owner}#1", made))
    table.handle(verifier, ev.Held(made))
    table.deliver()
    assert table.record.parts[0].outer_step == 1


def test_what_a_verifier_disputes_goes_to_others_and_says_who() -> None:
    table = Table("abcd", verify=1)
    table.elect("d")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    table.handle(verifier, ev.Disputed(0, part.grant, "outer step 1 is another"))
    table.run(LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and {part.owner, verifier}.isdisjoint({after.owner, *after.verifiers})
    assert any(f"owned by {part.owner}: {verifier} says" in notice.text for notice in table.done(ev.Noticed))


def test_who_has_an_old_record_blames_nobody_until_it_has_judged_by_the_keys_of_now() -> None:
    table = Table("abcde", verify=1)
    table.elect("e")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    (evicted, *_) = {*"abcd"} - {part.owner, verifier}
    stamp = table.record.stamp
    table.handle(verifier, ev.Disputed(0, part.grant, "signed with a key that f is not enrolled for"))
    disputed = [mail for mail in table.mail if isinstance(mail[2], ev.Release)]
    table.mail.clear()
    table.handle("e", ev.Evict(evicted, "an order"))
    table.mail += disputed  # it is late; and is not said again once the verifier has the record
    table.run(2 * LEASE_S, only={*"abcde"} - {evicted})
    late = ev.Disputed(0, part.grant, "signed with a key that f is not enrolled for", judged_by=stamp)  # it was judged before
    table.handle(verifier, late)
    table.run(LEASE_S, only={*"abcde"} - {evicted})
    assert disputed and table.record.evicted and not table.record.disputes
    assert (table.record.parts[0].owner, table.record.parts[0].grant) == (part.owner, part.grant)
    table.handle(verifier, replace(late, judged_by=table.record.stamp))
    table.run(LEASE_S, only={*"abcde"} - {evicted})
    assert verifier in table.record.disputes[part.owner] and table.record.parts[0].owner != part.owner


def test_who_verifies_and_was_restarted_does_not_go_on_with_the_grant() -> None:
    """It does not know any more what the owner's updates under it left out. Nobody is blamed."""
    table = Table("abcd", verify=1)
    table.elect("d")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    del table.councils[verifier]  # so quickly that nobody notices
    table.start(verifier)
    table.run(LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and after.owner == part.owner and len(after.verifiers) == 1
    assert not table.record.disputes and not any(council._distrusted(table.record) for council in table.councils.values())


def test_nor_does_it_where_it_disputed_and_the_keys_have_changed() -> None:
    """What it disputed is taken back, and what it said when it was started is not."""
    table = Table("abcde", verify=1)
    table.elect("e")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    (evicted, *_) = {*"abcd"} - {part.owner, verifier}

    def arrives(mail: Mail) -> bool:
        return not isinstance(mail[2], ev.Release)

    del table.councils[verifier]
    table.start(verifier)
    for _ in range(3):
        table.now += 0.05
        for peer_id in sorted(table.councils):
            table.handle(peer_id, ev.Tick())
        table.deliver(arrives)
    table.handle(verifier, ev.Disputed(0, part.grant, "signed with a key that f is not enrolled for"))
    table.handle("e", ev.Evict(evicted, "an order"))
    table.deliver(arrives)
    table.run(2 * LEASE_S, only={*"abcde"} - {evicted})
    assert table.record.evicted and table.record.parts[0].grant > part.grant and not table.record.disputes


def test_what_a_verifier_cannot_judge_is_merged_again_by_the_same_owner_and_nobody_is_blamed() -> None:
    table = Table("abcd", verify=1)
    table.elect("d")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    table.handle(part.verifiers[0], ev.Disputed(0, part.grant, "a key is not known", is_unclear=True))
    table.run(LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and after.owner == part.owner and not table.record.disputes


@pytest.mark.parametrize("blamed", [False, True])
def test_so_is_what_so_many_voters_cannot_judge_that_the_others_are_no_quorum(blamed: bool) -> None:
    """Where one of them says that it is none, the part goes to another; who only cannot tell disputes nothing."""
    table = Table("abc")
    table.elect("c")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    first, second = sorted({*"abc"} - {part.owner})
    table.handle(first, ev.Disputed(0, part.grant, "a key is not known", is_unclear=True))
    table.run(LEASE_S / 2)
    assert table.record.parts[0].grant == part.grant, "the others are a quorum"
    table.handle(second, ev.Disputed(0, part.grant, "its bytes are others", is_unclear=not blamed))
    table.run(LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and (after.owner != part.owner) == blamed
    assert table.record.disputes == ({part.owner: (second,), second: (part.owner,)} if blamed else {})


def test_of_who_is_not_there_nobody_waits_before_what_cannot_be_judged_is_merged_again() -> None:
    table = Table("abc")
    table.elect("b")
    table.run(LEASE_S)
    part = table.record.parts[0]
    table.kill("c")
    table.idle.add("b")
    table.make("a")
    table.handle("b", ev.Disputed(0, part.grant, "a key is not known", is_unclear=True))
    table.run(2 * LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and after.owner == "a" and len(table.record.voters) == 3 and not table.record.disputes


@pytest.mark.parametrize("is_unclear", [False, True])
def test_what_voters_say_of_different_outer_steps_does_not_add_up(is_unclear: bool) -> None:
    table = Table("abc")
    table.elect("c")
    table.run(LEASE_S)
    part = table.record.parts[0]
    for step, peer_id in enumerate("bcb", 1):
        table.idle = {peer_id}
        table.make("a")
        table.handle(peer_id, ev.Disputed(0, part.grant, "its record is old", is_unclear))
        table.run(2 * LEASE_S)
        assert table.steps() == dict.fromkeys("abc", step)
    assert (table.record.parts[0].owner, table.record.parts[0].grant) == ("a", part.grant) and not table.record.disputes


def verified_by(table: Table, liars: str, owner: str) -> bool:
    """Whether the next update of an owner is agreed on, where these dispute whatever they verify."""
    part = table.record.parts[0]
    assert part.owner == owner
    for verifier in {*part.verifiers} & {*liars}:
        table.handle(verifier, ev.Disputed(0, part.grant, "outer step 1 is another"))
    if {*part.verifiers} & {*liars}:
        table.run(LEASE_S)
        return False
    made = table.make(owner)
    table.run(LEASE_S)
    return table.record.parts[0].update == made.id


@pytest.mark.parametrize("verify", [1, 2])
def test_one_that_disputes_whatever_it_verifies_is_left_and_stops_nobody(verify: int) -> None:
    table = Table("abc", verify=verify)
    table.elect("c")
    table.run(LEASE_S / 2)
    for _ in range(6):
        while (owner := table.record.parts[0].owner) == "b":  # it owns nothing that it could not be disputed for
            table.handle("a", ev.Disputed(0, table.record.parts[0].grant, "outer step 1 is another"))
            table.run(LEASE_S)
        if verified_by(table, "b", owner):
            break
    else:
        raise AssertionError(table.record.parts)
    part = table.record.parts[0]
    assert "b" not in (part.owner, *part.verifiers) and len(part.verifiers) == 1


def dispute(table: Table, one: str, other: str) -> None:
    """The two own and verify part 0, and the verifier comes to other bits."""
    part = replace(table.record.parts[0], owner=one, verifiers=(other,))
    leader = table.councils[table.leaders[0]]
    leader._draft = table.record.with_part(0, replace(part, grant=part.grant + 1))
    table.run(LEASE_S / 10)
    assert (table.record.parts[0].owner, table.record.parts[0].verifiers) == (one, (other,))
    table.handle(other, ev.Disputed(0, table.record.parts[0].grant, "outer step 1 is another"))
    table.run(LEASE_S)


def test_whom_two_others_disagreed_with_stays_distrusted_under_another_leader_until_one_of_them_is_evicted() -> None:
    table = Table("abcde", verify=1)
    table.elect("e")
    table.run(LEASE_S / 2)
    dispute(table, "b", "a")
    dispute(table, "b", "c")
    assert table.record.disputes == {"b": ("a", "c"), "a": ("b",), "c": ("b",)}
    assert table.record.distrusted == {"b"}
    table.kill("e")
    table.run(4 * LEASE_S)
    assert table.leaders and table.leaders[0] != "e" and table.record.distrusted == {"b"}
    for _ in range(6):
        part = table.record.parts[0]
        assert "b" not in (part.owner, *part.verifiers)
        table.make(part.owner)
        table.run(LEASE_S)
    table.handle(table.leaders[0], ev.Evict("c", "it was wrong"))
    table.run(LEASE_S)
    assert table.record.disputes == {"b": ("a",), "a": ("b",)} and not table.record.distrusted


def test_of_two_the_one_that_is_not_believed_still_verifies() -> None:
    """Else whoever disputes could be left alone with the part."""
    record = Table("ab", verify=1).record
    found = record.assigned({"a", "b"}, [{"a", "b"}], {}, {"b"})
    assert (found.parts[0].owner, found.parts[0].verifiers) == ("a", ("b",))


def test_one_that_should_verify_and_does_not_is_not_waited_for_longer_than_verify_s() -> None:
    table = Table("abcd", verify=1)
    table.elect("d")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    (verifier,) = part.verifiers
    table.idle = {verifier}
    table.make(part.owner)
    table.run(VERIFY_S - LEASE_S)
    assert table.record.parts[0].grant == part.grant
    table.run(2 * LEASE_S)
    after = table.record.parts[0]
    assert after.grant > part.grant and after.owner == part.owner and verifier not in after.verifiers and after.verifiers
    said = [notice.text for notice in table.done(ev.Noticed)]
    assert f"part 0, owned by {part.owner}: not verified within {VERIFY_S:g} s by {verifier}" in said
    table.make(after.owner)
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 1


def test_a_leader_whose_version_is_on_its_way_does_not_look_at_the_verifiers_again_and_again() -> None:
    """What it would change has to wait for the version: waking up for it is a busy loop."""
    table = Table("abcde", verify=1)
    table.elect("d")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    table.idle = {*part.verifiers}
    table.make(part.owner)
    table.run(VERIFY_S - LEASE_S / 2)
    (evicted, *_) = set("abce") - {part.owner, *part.verifiers}
    table.handle("d", ev.Evict(evicted, "bad manners"))
    leader, kept = table.councils["d"], list(table.mail)
    assert leader.committed is not leader.record, "nobody has heard of it"
    table.now += LEASE_S / 2 + 0.01
    table.handle("d", ev.Tick())
    assert leader.role is Role.LEADER and leader.committed is not leader.record
    assert leader.next_wakeup() > table.now
    table.mail += kept
    table.run(LEASE_S / 4)
    assert table.record.parts[0].grant > part.grant, "it looks when the version is agreed on"


def test_a_part_moves_when_those_who_can_hold_its_owners_update_are_no_quorum() -> None:
    table = Table("abcde")
    table.elect("c")
    table.run(LEASE_S / 2)
    table.idle = set("bde")
    before, made = table.record.parts[0], table.make("a")
    for peer_id, moves in (("b", False), ("d", False), ("e", True)):
        table.works = False
        table.handle(peer_id, ev.Offered("a#1", made))
        held = table.done(ev.Hold, peer_id)[-1]
        table.handle(peer_id, ev.Failed(0, held, "a value is not finite", True))
        table.works = True
        table.run(LEASE_S / 2)
        assert (table.record.parts[0].grant > before.grant) is moves, peer_id
    part = table.record.parts[0]
    assert part.owner != "a" and set(table.record.disputes["a"]) == set("bde") and "a" in table.record.distrusted
    said = [notice.text for notice in table.done(ev.Noticed)]
    assert said.count("part 0, owned by a: b says: a value is not finite") == 1, "and is not told each time that it is said"
    table.idle = set()
    table.make(part.owner)
    table.run(LEASE_S)
    assert table.steps() == dict.fromkeys("abcde", 1)


def test_who_cannot_write_an_update_does_not_blame_its_owner() -> None:
    table = led()
    table.idle = {"b"}
    made, table.works = table.make("a"), False
    table.mail.clear()
    table.handle("b", ev.Offered("a#1", made))
    (held,) = table.done(ev.Hold, "b")
    table.handle("b", ev.Failed(0, held, "the disk is full"))
    assert not [mail for mail in table.mail if isinstance(mail[2], ev.Release)]


def test_only_the_owner_and_the_verifiers_release_a_part() -> None:
    table = led()
    before = table.record.parts
    table.say("b#1", "c", ev.Release(0, before[0].grant, "I want it", True))
    table.run(LEASE_S / 2)
    assert table.record.parts == before


def test_loads_are_evened_out_when_members_are_steady() -> None:
    table = Table("abc", owners="aaaaaa")
    table.elect("a")
    table.run(3 * LEASE_S)
    assert [part.owner for part in table.record.parts] == ["a"] * 6
    table.run(5 * LEASE_S)
    assert sorted(part.owner for part in table.record.parts) == ["a", "a", "b", "b", "c", "c"]


def test_parts_go_to_a_steady_member_that_is_reached_directly_and_to_others_while_it_is_away() -> None:
    members = {peer_id: Member(incarnation=1, relayed=peer_id != "c") for peer_id in "abc"}
    table = Table("abc", owners="aa", members=members)
    table.elect("a")
    table.run(3 * LEASE_S)
    assert [part.owner for part in table.record.parts] == ["a", "a"], "not before it has been there for a while"
    table.run(4 * LEASE_S)
    assert [part.owner for part in table.record.parts] == ["c", "c"]
    grants = [part.grant for part in table.record.parts]
    table.run(4 * LEASE_S)
    assert [part.grant for part in table.record.parts] == grants, "and stay"
    table.kill("c")
    table.run(2 * LEASE_S)
    assert sorted(part.owner for part in table.record.parts) == ["a", "b"]


def test_an_update_of_another_kind_of_base_is_not_counted() -> None:
    table = led()
    grant = table.record.parts[0].grant
    for base in (start_digest(3), start_digest(0)):
        held = update(0, 1, grant, base)
        states = (replace(table.states["b"][0], digest=base, held=held),)
        for sender in ("a#1", "b#1"):
            table.say(sender, "c", ev.Accepted(table.record.term, table.record.stamp, states))
    assert table.record.parts[0].digest == held.digest, "the run's base counts, the other does not"


def test_an_owner_that_returns_its_part_is_told_as_that() -> None:
    table = Table("abc")
    table.elect("a")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    table.say(f"{part.owner}#1", "a", ev.Release(0, part.grant, "its process has started", False))
    table.deliver()
    said = [notice.text for notice in table.done(ev.Noticed)]
    assert f"part 0: its owner {part.owner} returns it: its process has started" in said
