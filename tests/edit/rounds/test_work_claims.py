"""What the inner steps and tokens that a peer claims count for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edit.config.run import InnerConfig, ModelConfig, PenaltyConfig, RoundsConfig, RunConfig, SyncConfig
from edit.rounds.deadlines import Deadlines
from edit.rounds.work_claims import UsualWork, Work, WorkClaims

EVERY = 100
STEP_TOKENS = 4 * 2 * 128  # of run.toml as `usual` says it
LIE = Work(1 << 48, (1 << 63) - 1)
HONEST = Work(EVERY, EVERY * STEP_TOKENS)


def usual(rounds: RoundsConfig = RoundsConfig(), **sync: object) -> UsualWork:  # noqa: B008
    return UsualWork.of(
        RunConfig(
            sync=SyncConfig(every=EVERY, **sync),  # type: ignore[arg-type]
            inner=InnerConfig(batch_size=4, accumulation=2),
            model=ModelConfig(context=128),
            rounds=rounds,
            penalty=PenaltyConfig(),
        )
    )


class Claimed:
    """The claims of a run in which every round is closed by `committed`."""

    def __init__(self, work: UsualWork | None = None, idle_s: float = 0.0) -> None:
        self.deadlines = Deadlines(RoundsConfig())
        self.claims = WorkClaims(work or usual(), self.deadlines, idle_s)

    def here(self, *peers: str, now: float = 0.0) -> None:
        for peer_id in peers:
            self.claims.appeared(peer_id, now)

    def most(self, peer_id: str, group: int = 0) -> int:
        return self.claims.bounds(peer_id, group).most

    def counted(self, group: int = 0, **claims: Work) -> dict[str, Work]:
        return self.claims.counted(claims, {peer_id: self.claims.bounds(peer_id, group) for peer_id in claims})

    def committed(self, *merged: str, group: int = 0) -> None:
        bounds = {peer_id: self.claims.bounds(peer_id, group) for peer_id in merged}
        self.claims.closed(committed=True)
        for peer_id in merged:
            self.claims.merged(peer_id, group, bounds[peer_id])


def test_an_honest_claim_counts_as_it_is() -> None:
    run = Claimed()
    run.here("a", "b")
    for _ in range(3):
        assert run.counted(a=HONEST, b=HONEST) == {"a": HONEST, "b": HONEST}
        run.committed("a", "b")


def test_a_lie_counts_for_eight_honest_contributions_at_most() -> None:
    run = Claimed()
    run.here("a", "liar")
    for _ in range(5):
        counted = run.counted(a=HONEST, liar=LIE)
        assert counted == {"a": HONEST, "liar": Work(2 * EVERY, 4 * 2 * EVERY * STEP_TOKENS)}
        run.committed("a", "liar")


def test_nobody_contributes_after_fewer_steps_than_the_configuration_says() -> None:
    assert Claimed().counted(liar=Work(1, 5))["liar"] == Work(EVERY, 5)
    assert Claimed(usual(dylu=True)).counted(a=Work(1, 5))["a"] == Work(1, 5), "told to by DyLU"
    assert Claimed(usual(schedule="time")).counted(a=Work(1, 5))["a"] == Work(1, 5), "as many as it could"


def test_work_that_no_commit_took_is_still_behind_the_next_contribution() -> None:
    run = Claimed()
    run.here("a", "b")
    run.committed("a", "b")
    run.committed("b")
    run.claims.closed(committed=False)
    assert run.most("a") == 4 * EVERY and run.most("b") == 3 * EVERY


def test_with_groups_the_work_is_that_of_all_outer_steps_since_the_groups_last() -> None:
    run = Claimed(usual(groups=4))
    run.here("a")
    for outer_step in range(8):
        group = outer_step % 4
        steps = 25 * min(outer_step + 1, 4)
        assert run.counted(group, a=Work(steps, 0))["a"].inner_steps == steps
        assert run.most("a", group) == 25 * 5
        run.committed("a", group=group)


def test_work_during_an_absence_counts_by_the_speed_that_was_measured() -> None:
    run = Claimed()
    run.here("a", "b")
    run.deadlines.record_step("a", 0.5)
    run.deadlines.record_step("b", 0.5)
    run.committed("a", "b")
    run.claims.lost("a", 1000.0)
    run.claims.lost("a", 1500.0)  # said twice
    run.here("a", now=2000.0)
    assert run.most("a") == 2 * EVERY + 4 * 1000 / 0.5
    assert run.counted(a=Work(2000, 7))["a"] == Work(2000, 7)
    run.committed("a", "b")
    assert run.most("a") == 2 * EVERY, "once"


def test_an_absence_counts_for_nobody_who_was_never_measured_and_for_nobody_much_faster_than_the_others() -> None:
    run = Claimed()
    run.here("new", "fast", "a", "b")
    for peer_id, step_s in (("fast", 1e-6), ("a", 0.5), ("b", 0.5)):
        run.deadlines.record_step(peer_id, step_s)
    for peer_id in ("new", "fast"):
        run.claims.lost(peer_id, 0.0)
        run.here(peer_id, now=100.0)
    assert run.most("new") == 2 * EVERY
    assert run.most("fast") == 2 * EVERY + 4 * 100 * 16 / 0.5


def test_peers_may_have_trained_on_while_the_coordinator_stood_still() -> None:
    run = Claimed(idle_s=3600.0)
    run.deadlines.record_step("a", 1.0)  # from before
    run.here("a", "new")
    assert run.most("a") == 2 * EVERY + 4 * 3600 and run.most("new") == 2 * EVERY
    run.committed("a", "new")
    assert run.most("a") == run.most("new") == 2 * EVERY


def test_by_time_only_the_size_of_an_outer_step_is_known() -> None:
    run = Claimed(usual(schedule="time", time_s=60.0))
    assert run.counted(a=Work(1500, 0), liar=LIE) == {
        "a": Work(1500, 0),
        "liar": Work(32 * EVERY, 4 * 32 * EVERY * STEP_TOKENS),
    }


def test_merging_by_arrivals_the_commits_of_others_give_nobody_more_steps() -> None:
    run = Claimed(usual(RoundsConfig(merging="arrivals", max_staleness=4)))
    run.here("a", "liar")
    for _ in range(50):
        run.committed("a")
    assert run.most("liar") == 4 * 2 * EVERY
    run.claims.closed(committed=False)
    run.claims.closed(committed=False)
    assert run.most("liar") == 4 * 3 * EVERY


def test_own_loops_count_their_tokens_once_two_of_them_agree() -> None:
    large = Work(EVERY, 1000 * EVERY * STEP_TOKENS)
    run = Claimed()
    assert run.counted(a=large)["a"].tokens == 4 * EVERY * STEP_TOKENS, "nobody else says so"
    assert run.counted(a=large, b=large) == {"a": large, "b": large}
    assert run.counted(a=large)["a"] == large
    region = Work(EVERY, 3 * large.tokens)
    assert run.counted(region=region)["region"] == region
    liar = run.counted(liar=LIE)["liar"]
    assert liar.tokens == 4 * 2 * 1000 * EVERY * STEP_TOKENS


def test_a_batch_that_may_grow_counts_as_far_as_it_may() -> None:
    grown = Claimed(replace(usual(), growth=16))
    most = Work(EVERY, 16 * EVERY * STEP_TOKENS)
    assert grown.counted(a=most)["a"] == most
    assert grown.counted(a=Work(EVERY, most.tokens + 1))["a"] == most
    assert grown.counted(a=LIE)["a"] == Work(2 * EVERY, 2 * most.tokens)
    assert Claimed(replace(usual(), growth=2)).counted(a=most)["a"].tokens == 4 * EVERY * STEP_TOKENS
    inner = InnerConfig(accumulation=2, batch_growth=16)
    assert UsualWork.of(RunConfig(inner=inner)).growth == 16 and usual().growth == 1


def test_a_peer_that_says_few_tokens_takes_nothing_from_the_others() -> None:
    assert Claimed().counted(a=HONEST, b=HONEST, liar=Work(EVERY, 0)) == {"a": HONEST, "b": HONEST, "liar": Work(EVERY, 0)}
    assert Claimed().counted(a=HONEST, liar=Work(EVERY, 0))["a"] == HONEST


@pytest.mark.parametrize("claim", [LIE, Work(1, 0), Work(1 << 48, 0), Work(1, (1 << 63) - 1)])
def test_what_a_liar_says_changes_nothing_of_what_the_others_count_for(claim: Work) -> None:
    run = Claimed()
    run.here("a", "b", "liar")
    for _ in range(20):
        counted = run.counted(a=HONEST, b=HONEST, liar=claim)
        assert counted["a"] == counted["b"] == HONEST
        run.committed("a", "b", "liar")


def changing(every: int, *milestones: tuple[int, int], groups: int = 1) -> UsualWork:
    return UsualWork.of(RunConfig(sync=SyncConfig(every=every, groups=groups, milestones=milestones)))


def test_whoever_sees_only_the_claim_knows_the_most_that_it_counts_for() -> None:
    work = changing(8, (2, 16), (4, 4))
    assert [work.most_inner_steps(1, step, step) for step in range(6)] == [8, 8, 16, 16, 4, 4]
    assert [work.most_inner_steps(1, 1, last) for last in range(1, 6)] == [8, 16, 16, 16, 16]
    assert work.most_inner_steps(30, 0, 5) == 30 and usual(dylu=True).most_inner_steps(3, 0, 5) == 3


def test_after_h_has_shrunk_the_old_h_does_not_count() -> None:
    run = Claimed(changing(100, (3, 8)))
    run.here("a", "liar")
    for _ in range(3):
        assert run.counted(liar=LIE)["liar"].inner_steps == 2 * 100
        run.committed("a", "liar")
    for _ in range(2):
        counted = run.counted(a=Work(8, 1), liar=Work(100, 1))
        assert {peer_id: work.inner_steps for peer_id, work in counted.items()} == {"a": 8, "liar": 2 * 8}
        run.committed("a", "liar")


def test_a_peer_that_missed_rounds_counts_their_h() -> None:
    run = Claimed(changing(100, (2, 8)))
    run.here("a", "b")
    run.committed("a", "b")
    run.committed("a")  # b was cut off meanwhile, and trained on
    run.committed("a")
    assert run.most("b") == 8 + 100 + 8 + 8, "for the round of its last contribution, those it missed, and this one"


def test_after_h_has_grown_nobody_contributes_after_fewer_steps() -> None:
    run = Claimed(changing(8, (2, 100)))
    run.here("a")
    assert run.counted(a=Work(1, 1))["a"].inner_steps == 8
    run.committed("a")
    run.committed("a")
    assert run.counted(a=Work(9, 1))["a"].inner_steps == 9, "a contribution that came too late for the smaller H is made again"
    assert run.most("a") == 2 * 100
    run.committed("a")
    assert run.counted(a=Work(9, 1))["a"].inner_steps == 100


def test_with_groups_each_round_is_a_share_of_its_h() -> None:
    run = Claimed(changing(100, (2, 8), groups=2))
    run.here("a")
    run.committed("a", group=0)
    run.committed("a", group=1)
    assert run.most("a", group=0) == 4 + 50 + 4, "the other group's round was of the larger H"


def test_a_run_that_goes_on_has_the_h_of_its_outer_step() -> None:
    claims = WorkClaims(changing(100, (3, 8)), Deadlines(RoundsConfig()), 0.0, 5)
    claims.appeared("a", 0.0)
    assert claims.bounds("a", 0).most == 2 * 8
    assert claims.pace == 0.08
