"""PeerTimer: which phase a peer is in, and what is measured when it goes on to the next one."""

from __future__ import annotations

import json
import math

import pytest

from edit.config.run import RoundsConfig
from edit.rounds.contributions import ContributionBook
from edit.rounds.deadlines import Deadlines, PeerPhase
from edit.rounds.open_round import OpenRound
from edit.rounds.peer_timing import PeerTimer


class Timed:
    """A timer, and what it measured."""

    def __init__(self, max_staleness: int = 0, overlap: int = 0) -> None:
        self.deadlines = Deadlines(RoundsConfig())
        self.book = ContributionBook(max_staleness, 1)
        self.timer = PeerTimer(self.deadlines, self.book, overlap)

    @property
    def measured(self) -> dict[tuple[str, str], list[float]]:
        return {(peer_id, phase): times for peer_id, phase, times in json.loads(self.deadlines.to_json())}


def opened(*peers: str, at: float = 0.0) -> OpenRound:
    current = OpenRound(
        round_id=1,
        outer_step=1,
        quorum=1,
        due=(0,),
        whole=False,
        opened_at=at,
        counted_from=at,
        welcome_until=at,
        deadline=at,
    )
    for peer_id in peers:
        current.expect(peer_id, 10.0)
    current.punctual.update(peers)
    return current


def test_the_phases_of_a_peer() -> None:
    timed = Timed()
    assert timed.timer.phase_of("a", reported=0, outer_step=1) is PeerPhase.DOWNLOAD
    assert timed.timer.phase_of("a", reported=1, outer_step=1) is PeerPhase.COMPUTE
    begun = timed.book.begin("a", 1, 1, 0.0)
    assert begun is not None and timed.timer.phase_of("a", 1, 1) is PeerPhase.UPLOAD
    begun.whole = True
    assert timed.timer.phase_of("a", 1, 1) is PeerPhase.WAITING


def test_each_phase_is_measured_when_it_ends() -> None:
    timed, current = Timed(), opened("a", at=100.0)
    timed.timer.applied("a", 99.0)  # before any commit there is nothing to download
    timed.timer.published(100.0)
    timed.timer.applied("a", 103.0)
    timed.timer.applied("a", 104.0)  # only the first report of a step counts
    timed.timer.began("a", current, 110.0)
    timed.timer.began("late", current, 110.0)  # nobody knows since when it computes
    begun = timed.book.begin("a", 1, 1, 110.0)
    assert begun is not None
    timed.timer.ended("a", begun, 112.0)
    begun.steady = False
    timed.timer.ended("a", begun, 119.0)
    assert timed.measured == {("a", "download"): [3.0], ("a", "compute"): [7.0], ("a", "upload"): [2.0]}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_overdue_peer_took_at_least_the_time_it_was_given(max_staleness: int) -> None:
    timed, current = Timed(max_staleness), opened("computes", "uploads", "lost")
    current.expect_no_more("lost")
    timed.book.begin("uploads", 1, 1, 4.0)
    timed.timer.left_out(current, 9.0)
    assert timed.measured == {}, "nobody is overdue"
    timed.timer.left_out(current, 12.0)
    goes_on = {} if max_staleness else {("uploads", "upload"): [8.0]}  # what is carried over is measured when it ends
    assert timed.measured == {("computes", "compute"): [12.0], **goes_on}


def test_a_peer_is_free_while_it_trains_behind_its_exchange() -> None:
    timed = Timed(overlap=5)
    assert timed.timer.free_until("a") == -math.inf
    timed.book.begin("a", 1, 1, 100.0)
    timed.deadlines.claim("a", 2.0)
    assert timed.timer.free_until("a") == 110.0
    timed.timer.published(0.0)
    timed.timer.applied("a", 1.0)  # and must have fetched the update by then
    assert timed.timer.free_until("a") == 110.0 - timed.deadlines.allowed_s("a", PeerPhase.DOWNLOAD)
    assert Timed(overlap=0).timer.free_until("a") == -math.inf
