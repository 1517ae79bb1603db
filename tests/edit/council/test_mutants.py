"""A test of the tests: each rule that is broken on purpose is noticed, by a scripted scenario or by a simulated seed.

A scenario holds with the council as it is, and fails with the one whose rule is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from edit.council import events as ev
from edit.council import record as records
from edit.council.machine import FAR, Council, Role
from edit.council.record import Member, Stamp
from edit.lab.council.plan import Plan, draw
from edit.lab.council.search import failure
from edit.lab.council.swarm import Swarm
from tests.support.council import mutants
from tests.support.council.table import LEASE_S, Table, start_digest, update

Scenario = Callable[[type[Council]], None]


def one_vote_per_term(council: type[Council]) -> None:
    table = Table("abc", council=council)
    stamp = table.first.stamp
    assert table.say("a#1", "c", ev.Ask(5, stamp, False)) == [ev.Vote(5, True, False, 0.0)]
    assert table.say("b#1", "c", ev.Ask(5, stamp, False)) == [ev.Vote(5, False, False, 0.0)]
    assert table.say("a#1", "c", ev.Ask(5, stamp, False)) == [ev.Vote(5, True, False, 0.0)], "the same one asks again"


def a_vote_survives_a_kill(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.say("a#1", "c", ev.Ask(5, table.first.stamp, False))
    table.kill("c")
    table.start("c")
    assert table.say("b#1", "c", ev.Ask(5, table.first.stamp, False)) == [ev.Vote(5, False, False, 0.0)]
    assert table.councils["c"].term == 5


def a_candidate_that_lacks_something_gets_no_vote(council: type[Council]) -> None:
    table = Table("abc", council=council)
    older = Stamp(1, 1, 0)
    for trial in (True, False):
        (vote,) = table.say("a#1", "c", ev.Ask(5, older, trial))
        assert isinstance(vote, ev.Vote) and not vote.granted


def who_lost_its_disk_does_not_vote(council: type[Council]) -> None:
    """Not even in its old life: a shell that drew no new incarnation would otherwise lose what was committed."""
    table = Table("abc", council=council)
    table.elect("a")
    table.cut = {"c"}
    table.handle("a", ev.SetPhase(records.Phase.PAUSED))
    table.deliver()
    committed = table.record
    table.kill("b")
    table.wipe("b", 1)
    table.start("b")
    del table.councils["a"]
    table.cut = set()
    table.run(5 * LEASE_S)
    assert table.leaders == [], "c lacks what a and b agreed on"
    table.start("a")
    table.run(3 * LEASE_S)
    assert len(table.leaders) == 1 and table.record.phase is committed.phase


def what_is_said_is_on_disk_before(council: type[Council]) -> None:
    table = Table("abc", council=council)
    record = replace(table.first, term=6, version=2)
    for message in (ev.Ask(5, table.first.stamp, False), ev.Append(record.stamp, Stamp(0, 0, 0), record)):
        effects = table.handle("c", ev.Received("a#1", message))
        kinds = [type(effect) for effect in effects if isinstance(effect, (ev.Save, ev.Send))]
        assert kinds == [ev.Save, ev.Send]


def who_comes_back_deposes_nobody(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    term = table.record.term
    table.cut = {"c"}
    table.run(5 * LEASE_S)
    table.cut = set()
    table.run(2 * LEASE_S)
    assert table.leaders == ["a"] and table.record.term == term


def the_replaced_leader_is_not_waited_for(council: type[Council]) -> None:
    table = Table("abc", owners="a", council=council)
    table.elect("a")
    table.run(LEASE_S / 2)
    table.cut = {"a"}
    while table.leaders in ([], ["a"]):
        table.run(0.05)
    table.run(0.2)
    assert table.record.parts[0].owner != "a"


def an_old_leader_is_not_followed(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    table.run(LEASE_S / 2)
    stale = Stamp(1, table.record.term - 1, 99)
    (answer,) = table.say("b#1", "c", ev.Append(stale, stale))
    assert isinstance(answer, ev.Accepted) and answer.term == table.record.term, "it learns the term"
    assert table.councils["c"].leader == "a"


def terms_cannot_be_used_up(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    table.say("b#1", "c", ev.Append(Stamp(1, 2 + FAR + 1, 1), Stamp(0, 0, 0)))
    assert table.councils["c"].term == 2


def a_leader_that_hears_nobody_follows(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    table.cut = {"a"}
    table.run(2.2 * LEASE_S)
    assert table.councils["a"].role is not Role.LEADER


def an_accepted_record_survives_a_kill(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    newest = table.record.stamp
    table.kill("c")
    table.start("c")
    assert table.councils["c"].record is not None and table.councils["c"].record.stamp == newest


def a_record_that_comes_late_changes_nothing(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    newest, older = table.record, replace(table.record, version=table.record.version - 1)
    table.say("a#1", "c", ev.Append(older.stamp, Stamp(0, 0, 0), older))
    assert table.councils["c"].record == newest


def a_new_leader_commits_with_a_version_of_its_own_term(council: type[Council]) -> None:
    """Else a record of an earlier term that a quorum has could be counted as committed, and still be replaced."""
    table = Table("abc", council=council)
    council_of_a = table.councils["a"]
    council_of_a._election_at = table.now
    table.handle("a", ev.Tick())
    table.deliver(lambda mail: not isinstance(mail[2], (ev.Append, ev.Accepted)))
    assert council_of_a.role is Role.LEADER and council_of_a.record is not None
    assert council_of_a.record.term == council_of_a.term


def a_version_is_committed_when_a_quorum_has_it(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    before = table.record.stamp
    table.handle("a", ev.SetPhase(records.Phase.PAUSED))
    assert table.councils["a"].committed is not None and table.councils["a"].committed.stamp == before
    table.deliver()
    assert table.councils["a"].committed.stamp > before


def voters_change_in_two_versions(council: type[Council]) -> None:
    """While they change, no quorum of the new list alone can decide: a and b left c out, and c does not know yet."""
    table = Table("abc", blank="d", council=council)
    table.elect("a")
    table.run(3 * LEASE_S)
    versions = [committed.record for committed in table.done(ev.Committed, "a")]
    changed = [(old, new) for old, new in pairwise(versions) if old.voters != new.voters]
    assert changed and all(new.before == old.voters and not old.before for old, new in changed)


def who_has_no_state_does_not_vote(council: type[Council]) -> None:
    table = Table("a", blank="b", council=council)
    table.works = False
    table.run(3 * LEASE_S)
    assert "b" in table.record.members and table.record.voters == ("a#1",)


def a_stranger_is_not_listened_to(council: type[Council]) -> None:
    table = Table("abc", council=council)
    assert table.say("z#1", "c", ev.Ask(5, Stamp(1, 4, 1), False)) == []
    assert table.councils["c"].term == 1


def who_was_evicted_stays_out(council: type[Council]) -> None:
    table = Table("abc", council=council)
    table.elect("a")
    table.handle("a", ev.Evict("b", "it lied"))
    table.run(LEASE_S)
    table.say("b#2", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=2)))
    table.run(LEASE_S)
    assert "b" not in table.record.members


def a_life_that_is_over_does_not_come_back(council: type[Council]) -> None:
    table = Table("ab", members={"a": Member(incarnation=1), "b": Member(incarnation=1)}, council=council)
    table.elect("a")
    table.kill("b")
    table.say("b#0", "a", ev.Hello(Stamp(0, 0, 0), Member(incarnation=0)))
    table.run(LEASE_S)
    assert table.record.members["b"].incarnation == 1


def a_step_needs_a_quorum_of_holders(council: type[Council]) -> None:
    table = _served(council)
    table.cut = {"b", "c"}
    table.make("a")
    table.cut = set()
    table.deliver()
    assert table.record.parts[0].outer_step == 0


def a_step_needs_those_who_verify_it(council: type[Council]) -> None:
    table = Table("abcde", verify=1, council=council)
    table.elect("e")
    table.run(LEASE_S / 2)
    part = table.record.parts[0]
    table.works = False
    made = table.make(part.owner)
    table.handle(part.owner, ev.Held(made))
    for peer_id in {*"abcde"} - {part.owner, *part.verifiers}:
        table.handle(peer_id, ev.Offered(f"{part.owner}#1", made))
        table.handle(peer_id, ev.Held(made))
    table.deliver()
    assert table.record.parts[0].outer_step == 0


def a_part_moves_on_a_committed_record_only(council: type[Council]) -> None:
    table = _served(council)
    table.make("a")
    table.deliver(lambda mail: not (isinstance(mail[2], ev.Append) and mail[2].committed == mail[2].stamp))
    assert table.steps() == {"a": 0, "b": 0, "c": 1}


def a_grant_is_served_by_one_process(council: type[Council]) -> None:
    table = _served(council)
    before = [serve.grant for serve in table.done(ev.Serve, "a")]
    del table.councils["a"]
    table.start("a")
    table.run(LEASE_S)
    assert not {*before} & {serve.grant for serve in table.done(ev.Serve, "a")[len(before) :]}


def what_an_old_grant_made_is_not_held(council: type[Council]) -> None:
    table = _served(council)
    old = update(0, 1, table.record.parts[0].grant - 1, start_digest(0))
    table.handle("b", ev.Offered("a#1", old))
    assert table.done(ev.Hold, "b") == []


def what_is_held_stays_until_another_grant(council: type[Council]) -> None:
    table = _served(council)
    grant = table.record.parts[0].grant
    one, two = (update(0, 1, grant, start_digest(0), content) for content in ("one", "two"))
    table.handle("b", ev.Offered("a#1", one))
    table.handle("b", ev.Offered("a#1", two))
    assert table.states["b"][0].held == one


def an_update_of_another_state_is_not_held(council: type[Council]) -> None:
    table = _served(council)
    table.handle("b", ev.Offered("a#1", update(0, 1, table.record.parts[0].grant, start_digest(7))))
    assert table.done(ev.Hold, "b") == []


def a_fetch_is_tried_again(council: type[Council]) -> None:
    table = _served(council)
    table.cut = {"b"}
    table.make("a")
    table.deliver()
    table.works, table.cut = False, set()
    table.run(LEASE_S)
    (fetch,) = table.done(ev.Fetch, "b")
    table.handle("b", ev.Failed(0, fetch, "broken"))
    table.works = True
    table.run(LEASE_S)
    assert table.steps()["b"] == 1


def _served(council: type[Council]) -> Table:
    """A table whose leader is c, and whose owner a serves the part."""
    table = Table("abc", council=council)
    table.elect("c")
    table.run(LEASE_S / 2)
    return table


SCRIPTED: dict[type[Council], Scenario] = {
    mutants.VotesTwice: one_vote_per_term,
    mutants.ForgetsVotes: a_vote_survives_a_kill,
    mutants.VotesForAnybody: a_candidate_that_lacks_something_gets_no_vote,
    mutants.VotesBlank: who_lost_its_disk_does_not_vote,
    mutants.SaysFirst: what_is_said_is_on_disk_before,
    mutants.NoTrial: who_comes_back_deposes_nobody,
    mutants.FreshLease: the_replaced_leader_is_not_waited_for,
    mutants.FollowsOldTerms: an_old_leader_is_not_followed,
    mutants.FollowsAnyTerm: terms_cannot_be_used_up,
    mutants.LeadsAlone: a_leader_that_hears_nobody_follows,
    mutants.ForgetsRecords: an_accepted_record_survives_a_kill,
    mutants.TakesOlderRecords: a_record_that_comes_late_changes_nothing,
    mutants.CommitsOldTerms: a_new_leader_commits_with_a_version_of_its_own_term,
    mutants.CommitsAlone: a_version_is_committed_when_a_quorum_has_it,
    mutants.OneList: voters_change_in_two_versions,
    mutants.VotersWithoutState: who_has_no_state_does_not_vote,
    mutants.TrustsStrangers: a_stranger_is_not_listened_to,
    mutants.LetsEvictedIn: who_was_evicted_stays_out,
    mutants.TakesOldLives: a_life_that_is_over_does_not_come_back,
    mutants.AnyHolders: a_step_needs_a_quorum_of_holders,
    mutants.NoVerifiers: a_step_needs_those_who_verify_it,
    mutants.AdoptsEarly: a_part_moves_on_a_committed_record_only,
    mutants.KeepsGrants: a_grant_is_served_by_one_process,
    mutants.HoldsOldGrants: what_an_old_grant_made_is_not_held,
    mutants.HoldsAnother: what_is_held_stays_until_another_grant,
    mutants.HoldsAnyBase: an_update_of_another_state_is_not_held,
    mutants.FetchesOnce: a_fetch_is_tried_again,
}


@pytest.mark.parametrize("scenario", SCRIPTED.values(), ids=lambda scenario: scenario.__name__)
def test_the_council_keeps_the_rule(scenario: Scenario) -> None:
    scenario(Council)


@pytest.mark.parametrize("mutant", SCRIPTED, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_noticed(mutant: type[Council]) -> None:
    with pytest.raises(AssertionError):
        SCRIPTED[mutant](mutant)


SIMULATED = [  # each is noticed by one of the first seeds
    mutants.HastyVotesTwice,
    mutants.KeepsShortLease,
    mutants.ForgetsRecords,
    mutants.CommitsOldTerms,
    mutants.VotersWithoutState,
    mutants.AnyHolders,
    mutants.KeepsGrants,
    mutants.FetchesOnce,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", SIMULATED, ids=lambda mutant: mutant.__name__)
def test_the_simulation_notices_a_broken_rule(mutant: type[Council]) -> None:
    def make(plan: Plan, lines: list[str] | None = None) -> Swarm:
        return Swarm(plan, mutant, lines)

    assert any(failure(draw(seed), make) for seed in range(60))


@pytest.mark.exhaustive
def test_the_simulation_notices_a_member_that_lost_its_disk_and_keeps_its_name() -> None:
    def make(plan: Plan, lines: list[str] | None = None) -> Swarm:
        return Swarm(plan, Council, lines, keeps_name=True)

    assert any(failure(draw(seed), make) for seed in range(60))


def test_an_id_without_the_base_is_noticed() -> None:
    """Two steps with equal bytes would be one: a member whose state differs would count as a holder."""

    def ids_differ(make: Callable[..., str]) -> bool:
        return make("run", 0, 1, start_digest(0), b"same") != make("run", 0, 1, start_digest(1), b"same")

    def without_base(run_id: str, part: int, outer_step: int, base: str, manifest: bytes) -> str:
        return records.update_id(run_id, part, outer_step, "", manifest)

    assert ids_differ(records.update_id) and not ids_differ(without_base)
