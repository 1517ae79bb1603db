"""Contributions that outlive their rounds, against a scripted coordinator: carried, merged later, refused, sent again."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from edit.errors import TransportError
from edit.records import Aborted, Committed, Finished, Outcome
from editpb.messages import RunPhase
from peers.carriers.io_thread import SLICE_S
from tests.support.encoded import encode
from tests.support.fake_coordinator import FIRST_ROUND, FakeCoordinator
from tests.support.fake_run import LARGE, SMALL, Peer, run_of, vectors
from tests.support.two_ranks import SIZES, Rank, with_two_ranks

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "no longer held")


def others(fake: FakeCoordinator, seed: int) -> None:
    payloads = [encode("fp32", delta) for delta in vectors(SMALL, seed)]
    fake.io.change(lambda: fake.other_peer_commits(payloads))


def carried(outcome: Outcome | None) -> bool:
    """Of a commit; whether it has the verdict on this peer instead."""
    assert isinstance(outcome, Committed)
    assert outcome.carried != (outcome.commit.fragments[0].verdict_of("a") is not None)
    return outcome.carried


def contributed(fake: FakeCoordinator, peer: Peer, outer_step: int = 0, seed: int = 1) -> int:
    """All of a contribution has arrived; the round that it names."""
    before = set(fake.headers)
    peer.contribute(vectors(SMALL, seed), outer_step)
    fake.await_(lambda f: len(set(f.headers) - before) == len(SMALL))
    return max(slot[0] for slot in set(fake.headers) - before)


def test_what_misses_commits_is_carried_until_its_verdict_comes_and_nothing_is_sent_twice() -> None:
    with run_of(max_staleness=2) as (fake, peer):
        assert contributed(fake, peer) == FIRST_ROUND
        for step in (0, 1):
            others(fake, step)
            assert carried(peer.ask(step))
            assert peer.collective.outcome(step + 1, block=False) is None
        fake.io.change(lambda: fake.commit(named=FIRST_ROUND))
        assert not carried(peer.ask(2))
        assert fake.calls["Contribute"] == len(SMALL)
        assert contributed(fake, peer, outer_step=3, seed=2) > FIRST_ROUND


def test_one_that_is_on_its_way_goes_on_under_the_round_it_named() -> None:
    with run_of(LARGE, max_staleness=2) as (fake, peer):
        fake.break_contribution_after = [1 << 40, 1 << 18]
        fake.script = lambda f: f.commit(named=FIRST_ROUND)
        peer.contribute(vectors(LARGE, 1))
        fake.await_(lambda f: f.calls["Probe"])
        fake.io.change(lambda: fake.abort("too few"))
        assert not carried(peer.ask())
        assert {slot[0] for slot in fake.headers} == {FIRST_ROUND}


def test_work_of_an_earlier_outer_step_goes_to_the_open_round() -> None:
    with run_of(max_staleness=2) as (fake, peer):
        contributed(fake, peer)
        others(fake, 1)
        fake.io.change(lambda: fake.commit(named=FIRST_ROUND))
        assert [carried(peer.ask(step)) for step in (0, 1)] == [True, False]
        assert peer.collective.outcome(2, block=False) is None
        named = contributed(fake, peer, outer_step=1, seed=3)  # it began there
        fake.await_(lambda f: f.heartbeats[-1].outer_step == 2)  # but that is where the peer stands
        fake.io.change(lambda: fake.commit(named=named))
        assert not carried(peer.ask(2))


def test_one_that_is_refused_is_lost_at_the_outer_step_the_run_had_reached() -> None:
    with run_of(max_staleness=2) as (fake, peer):
        contributed(fake, peer)
        fake.io.change(lambda: setattr(fake, "refuse_contributions", [REFUSED] * 2))
        fake.io.change(lambda: fake.lose(FIRST_ROUND))
        fake.io.change(lambda: fake.abort("the disk is full"))
        assert peer.ask() == Aborted("no longer held")
        assert contributed(fake, peer) > FIRST_ROUND


def test_one_that_is_too_stale_is_not_carried_any_further() -> None:
    with run_of(max_staleness=1) as (fake, peer):
        contributed(fake, peer)
        others(fake, 1)
        others(fake, 2)
        outcomes = [peer.ask(step) for step in (0, 1)]
        assert [outcome.carried for outcome in outcomes if isinstance(outcome, Committed)] == [True, False]
        assert peer.collective.outcome(2, block=False) is None


def test_what_a_lost_round_has_swallowed_is_sent_again_as_what_it_was() -> None:
    with run_of(max_staleness=2) as (fake, peer):
        contributed(fake, peer)
        fake.io.change(lambda: fake.lose(FIRST_ROUND))
        fake.script = lambda f: f.commit(named=FIRST_ROUND)
        fake.io.change(lambda: fake.abort("the disk is full"))
        assert not carried(peer.ask())
        assert fake.calls["Contribute"] == 2 * len(SMALL)


@pytest.mark.parametrize(
    ("forget", "sent"),
    [(lambda fake: None, 1), (lambda fake: fake.lose(FIRST_ROUND), 2)],
    ids=["it is still there", "it is gone"],
)
def test_after_a_new_connection_only_what_is_missing_is_sent(forget: Callable[[FakeCoordinator], None], sent: int) -> None:
    with run_of(max_staleness=2) as (fake, peer):
        contributed(fake, peer)
        fake.stop()
        peer.await_link(False)
        fake.io.change(lambda: forget(fake))
        fake.start()
        peer.await_link(True)
        fake.await_(lambda f: f.calls["Probe"] == len(SMALL) and f.complete(FIRST_ROUND))
        fake.io.change(lambda: fake.commit(named=FIRST_ROUND))
        assert not carried(peer.ask())
        assert fake.calls["Contribute"] == sent * len(SMALL)


def test_the_end_of_the_run_is_told_whatever_is_on_its_way() -> None:
    with run_of(max_staleness=2) as (fake, peer):
        contributed(fake, peer)
        others(fake, 1)
        fake.show(phase=RunPhase.FINISHED, round_id=0)
        assert isinstance(peer.ask(), Committed)
        assert peer.ask(1) == Finished(1)


def test_a_commit_brings_the_number_of_inner_steps_until_the_next_contribution() -> None:
    with run_of() as (fake, peer):
        fake.script = FakeCoordinator.commit
        fake.show(inner_steps=17)
        peer.contribute(vectors(SMALL, 1))
        outcome = peer.ask()
        assert isinstance(outcome, Committed) and outcome.inner_steps == 17


def test_who_asks_for_a_snapshot_while_cut_off_rests_before_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of() as (fake, peer):
        fake.stop()
        peer.await_link(False)
        assert peer.collective.outcome(0, block=True) is None
        rests: list[float | None] = []
        wait = peer.io.wait

        def counted(look: Callable[[], object | None], timeout: float | None = None) -> object | None:
            rests.append(timeout)
            return wait(look, timeout)

        monkeypatch.setattr(peer.io, "wait", counted)
        for _ in range(3):
            with pytest.raises(TransportError):
                peer.collective.snapshot()
        assert rests == [SLICE_S] * 3


def test_where_contributions_outlive_rounds_all_ranks_name_the_round_that_rank_0_names() -> None:
    """Rank 1 has heard of a newer round when it contributes."""
    deltas = vectors(SIZES, 1)

    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        assert rank.collective.outcome(0, block=False) is None  # as before each contribution
        rank.only(0, lambda: rank.contribute(deltas))
        rank.only(0, lambda: fake.await_(lambda f: len(f.headers) == 3))
        rank.only(0, lambda: fake.io.change(lambda: fake.abort("the disk is full")))
        rank.only(1, lambda: rank.contribute(deltas))
        rank.only(1, lambda: fake.await_(lambda f: f.complete(FIRST_ROUND)))
        rank.only(0, lambda: fake.io.change(lambda: fake.commit(named=FIRST_ROUND)))
        return rank.collective.outcome(0, block=True)

    for outcome in with_two_ranks(work, max_staleness=2):
        assert isinstance(outcome, Committed) and not outcome.carried
        assert outcome.commit.fragments[0].verdict_of("a") is not None


def test_a_part_that_is_refused_ends_the_contribution_of_all_ranks() -> None:
    def work(fake: FakeCoordinator, rank: Rank) -> Outcome | None:
        assert rank.collective.outcome(0, block=False) is None
        rank.only(0, lambda: rank.contribute(vectors(SIZES, 1)))
        rank.only(0, lambda: fake.await_(lambda f: len(f.headers) == 3))
        rank.only(1, lambda: fake.refuse_contributions.extend([(grpc.StatusCode.FAILED_PRECONDITION, "bytes were bad")] * 2))
        rank.only(1, lambda: rank.contribute(vectors(SIZES, 1)))
        return rank.collective.outcome(0, block=True)

    assert with_two_ranks(work, max_staleness=2) == [Aborted("bytes were bad")] * 2
