"""Exactly once per round, counted in optimizer steps; lost rounds keep their work; every fragment once in P outer steps."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import LocalProtocolError, StorageError
from edit.worker.schedule import SyncSchedule, Work
from tests.support.exhaustive import examples


@pytest.mark.parametrize(("steps", "every", "answer"), [(0, 1, False), (1, 1, True), (2, 3, False), (3, 3, True), (4, 3, True)])
def test_a_contribution_is_due_after_so_many_steps(steps: int, every: int, answer: bool) -> None:
    schedule = SyncSchedule(every)
    schedule.count_steps(steps)
    assert schedule.due() is answer


@given(every=st.integers(1, 20), steps=st.integers(0, 200))
@settings(deadline=None, max_examples=examples(60))
def test_a_contribution_goes_out_once_per_round(every: int, steps: int) -> None:
    schedule, sent = SyncSchedule(every), []
    for step in range(1, steps + 1):
        schedule.count_steps()
        if schedule.due():
            schedule.merged(schedule.contributed())
            sent.append(step)
    assert sent == list(range(every, steps + 1, every))
    assert schedule.inner_steps == steps
    assert schedule.round_inner_steps == schedule.work().inner_steps == steps % every


def test_asking_twice_changes_nothing() -> None:
    schedule = SyncSchedule(1)
    schedule.count_steps()
    assert schedule.due() and schedule.due() and schedule.at_boundary() and schedule.inner_steps == 1


def test_a_lost_round_waits_for_another_h_steps_and_keeps_its_work() -> None:
    schedule = SyncSchedule(2)
    for _ in range(2):
        schedule.count_steps()
        schedule.count_tokens(10)
    assert schedule.contributed() == Work(2, 20)
    assert not schedule.due()  # aborted: nothing was merged
    for _ in range(2):
        schedule.count_steps()
        schedule.count_tokens(10)
    assert schedule.due()
    assert schedule.contributed() == Work(4, 40)


def test_work_done_while_the_outcome_was_open_stays_for_the_next_contribution() -> None:
    schedule = SyncSchedule(2)
    schedule.count_steps()
    schedule.count_steps()
    work = schedule.contributed()
    schedule.count_steps()
    schedule.count_tokens(7)
    schedule.merged(work)
    assert schedule.work() == Work(1, 7) and schedule.round_inner_steps == 1


def test_boundaries_come_every_h_steps_even_when_nothing_can_be_sent() -> None:
    schedule, boundaries = SyncSchedule(3), []
    assert not schedule.at_boundary()
    for step in range(1, 10):
        schedule.count_steps()
        if schedule.at_boundary():
            boundaries.append(step)
    assert boundaries == [3, 6, 9]


def test_negative_tokens_are_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="cannot be negative"):
        SyncSchedule(1).count_tokens(-1)


# Streaming groups.


def counted(schedule: SyncSchedule, steps: int, tokens: int) -> None:
    for _ in range(steps):
        schedule.count_steps()
        schedule.count_tokens(tokens)


def test_each_group_counts_the_work_since_it_was_merged_itself() -> None:
    schedule = SyncSchedule(2, groups=3)
    sent = []
    for outer_step in range(6):
        counted(schedule, 2, 10)
        assert schedule.due()
        sent.append(schedule.contributed(outer_step % 3))
        schedule.merged(sent[-1], outer_step % 3)
    assert sent == [Work(2, 20), Work(4, 40), Work(6, 60), Work(6, 60), Work(6, 60), Work(6, 60)]
    assert [schedule.work(group) for group in range(3)] == [Work(4, 40), Work(2, 20), Work(0, 0)]


def test_counters_go_on_where_a_checkpoint_left_them() -> None:
    schedule, other = SyncSchedule(3, groups=2), SyncSchedule(3, groups=2)
    counted(schedule, 3, 5)
    schedule.merged(schedule.contributed(1), 1)
    counted(schedule, 2, 5)
    other.load(json.loads(json.dumps(schedule.state())))
    for one in (schedule, other):
        counted(one, 1, 5)
        assert one.due and (one.inner_steps, one.round_inner_steps) == (6, 3)
        assert (one.work(0), one.work(1)) == (Work(6, 30), Work(3, 15))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner_steps": None}, "the counters of inner steps are damaged"),
        ({"work": [[1]]}, "the counters of inner steps are damaged"),
        ({"work": [[1, 2]]}, "written with 1 groups of fragments, this run has 2"),
    ],
)
def test_damaged_counters_or_those_of_other_groups_change_nothing(change: dict[str, Any], message: str) -> None:
    schedule = SyncSchedule(3, groups=2)
    counted(schedule, 2, 5)
    before = schedule.state()
    with pytest.raises(StorageError, match=message):
        schedule.load({**before, **change})
    with pytest.raises(StorageError, match="damaged"):
        schedule.load({})
    assert schedule.state() == before


# By time (A-EDiT).

EPOCH_S = 1.7e9  # a clock this far from zero has a resolution of 128 s in float32


def idle_of_the_fast_peer(rounds: int, step_s: tuple[float, float], time_s: float) -> list[float]:
    """Two peers contribute by the clock; a round is over for both when the slower one is in. Seconds the faster one waits."""
    peers = [SyncSchedule(128, interval_s=time_s) for _ in step_s]
    now, idle = EPOCH_S, []
    for peer in peers:
        peer.completed(now)
    for _ in range(rounds):
        arrived = []
        for peer, seconds in zip(peers, step_s, strict=True):
            at = now
            while not peer.due(at):
                at += seconds
                peer.count_steps()
            peer.contributed(now=at)
            arrived.append(at)
        now = max(arrived)
        for peer in peers:
            peer.completed(now)
        idle.append(now - min(arrived))
    return idle


def test_t3_a_fast_peers_idle_time_stays_below_one_step_of_the_slow_one() -> None:
    """1.0 against 3.7 s/step: counted from arrival it was 8 s in round 1, 108 s in round 100, 598 of 600 s in round 1000."""
    idle = idle_of_the_fast_peer(1000, (1.0, 3.7), 600.0)
    assert max(idle) < 3.7
    assert idle[0] == pytest.approx(3.1, abs=1e-3) and idle[-1] == pytest.approx(3.1, abs=1e-3)


def test_t3_the_deadline_is_kept_to_the_step_far_from_the_clocks_zero() -> None:
    schedule = SyncSchedule(128, interval_s=0.5)
    schedule.completed(EPOCH_S)
    schedule.count_steps()
    assert not schedule.due(EPOCH_S + 0.4999) and schedule.due(EPOCH_S + 0.5)


def test_by_time_the_number_of_steps_does_not_matter_but_one_there_must_be() -> None:
    schedule = SyncSchedule(2, interval_s=10.0)
    schedule.completed(100.0)
    assert not schedule.due(200.0), "nothing to contribute"
    for _ in range(5):
        schedule.count_steps()
    assert not schedule.due(109.0) and schedule.due(110.0)
    assert schedule.contributed(now=110.0).inner_steps == 5
    schedule.count_steps()
    assert not schedule.at_boundary(119.0) and schedule.at_boundary(120.0), "no outcome for one interval: wait for it"
    schedule.completed(125.0)
    assert not schedule.due(134.0) and schedule.due(135.0), "counted from the completion"


def test_by_time_an_outcome_that_does_not_come_is_waited_for_once_per_interval() -> None:
    schedule = SyncSchedule(4, interval_s=10.0)
    schedule.completed(0.0)
    schedule.count_steps()
    schedule.contributed(now=10.0)
    schedule.count_steps()
    waits = []
    for now in range(15, 50):
        if schedule.at_boundary(float(now)):
            waits.append(now)
            schedule.waited(float(now))
    assert waits == [20, 30, 40]
    assert schedule.due(49.0), "the next contribution is not put off"


def test_dylu_changes_the_number_of_steps_from_now_on() -> None:
    schedule = SyncSchedule(4)
    schedule.adopt(2)
    schedule.count_steps()
    assert not schedule.due() and schedule.every == 2
    schedule.count_steps()
    assert schedule.due()
