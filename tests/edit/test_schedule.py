"""Exactly once per round, counted in optimizer steps; lost rounds keep their work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import LocalProtocolError
from edit.schedule import SyncSchedule, Work, due


@pytest.mark.parametrize(("steps", "every", "answer"), [(0, 1, False), (1, 1, True), (2, 3, False), (3, 3, True), (4, 3, True)])
def test_due(steps: int, every: int, answer: bool) -> None:
    assert due(steps, every) is answer


@given(every=st.integers(1, 20), steps=st.integers(0, 200))
@settings(deadline=None, max_examples=60)
def test_a_contribution_goes_out_once_per_round(every: int, steps: int) -> None:
    schedule, sent = SyncSchedule(every), []
    for step in range(1, steps + 1):
        schedule.count_step()
        if schedule.due:
            schedule.merged(schedule.contributed())
            sent.append(step)
    assert sent == list(range(every, steps + 1, every))
    assert schedule.inner_steps == steps
    assert schedule.round_inner_steps == schedule.work.inner_steps == steps % every


def test_asking_twice_changes_nothing() -> None:
    schedule = SyncSchedule(1)
    schedule.count_step()
    assert schedule.due and schedule.due and schedule.at_boundary and schedule.inner_steps == 1


def test_a_lost_round_waits_for_another_h_steps_and_keeps_its_work() -> None:
    schedule = SyncSchedule(2)
    for _ in range(2):
        schedule.count_step()
        schedule.count_tokens(10)
    assert schedule.contributed() == Work(2, 20)
    assert not schedule.due  # aborted: nothing was merged
    for _ in range(2):
        schedule.count_step()
        schedule.count_tokens(10)
    assert schedule.due
    assert schedule.contributed() == Work(4, 40)


def test_work_done_while_the_outcome_was_open_stays_for_the_next_contribution() -> None:
    schedule = SyncSchedule(2)
    schedule.count_step()
    schedule.count_step()
    work = schedule.contributed()
    schedule.count_step()
    schedule.count_tokens(7)
    schedule.merged(work)
    assert schedule.work == Work(1, 7) and schedule.round_inner_steps == 1


def test_boundaries_come_every_h_steps_even_when_nothing_can_be_sent() -> None:
    schedule, boundaries = SyncSchedule(3), []
    assert not schedule.at_boundary
    for step in range(1, 10):
        schedule.count_step()
        if schedule.at_boundary:
            boundaries.append(step)
    assert boundaries == [3, 6, 9]


def test_negative_tokens_are_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="cannot be negative"):
        SyncSchedule(1).count_tokens(-1)
