"""What a status shows of a run's past: bounded, in words, and continuous over the processes of a peer."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from aggregator.control.history import History, Line
from aggregator.run_feed import Advised, MemberChanged, OrderGiven, PeerReported, RunEvent
from edit.config.algorithm import SyncConfig
from edit.records import FragmentCommit, PeerVerdict, Verdict
from edit.rounds.deadlines import PeerPhase
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import SHARES, Curve, RoundReport
from tests.support.statuses import busy_run


class Told:
    """A history, the clock and what each peer does."""

    def __init__(self) -> None:
        self.phases: dict[str, PeerPhase] = {}
        self.tokens, self.t = 0, 1000.0
        self.history = History(lambda: self.tokens)

    def event(self, event: RunEvent, after_s: float = 1.0) -> None:
        self.t += after_s
        self.history.on_event(event, self.t)

    def report(self, peer_id: str, inner_steps: int, loss: float, after_s: float = 1.0) -> None:
        beat = Heartbeat(state=PeerState.TRAINING, inner_steps=inner_steps, loss=loss)
        self.event(PeerReported(peer_id, beat, self.phases.get(peer_id)), after_s)

    def commit(self, step: int, *verdicts: PeerVerdict, after_s: float = 1.0, merged: float = 1.0) -> None:
        fragment = FragmentCommit(fragment_id=0, payload=None, verdicts=verdicts, merged_norm=merged, clip=1.0)
        self.event(closed(step, fragments=(fragment,)), after_s)

    def curve(self, kind: str, peer_id: str = "") -> Curve:
        return next(each for each in self.history.curves() if (each.kind, each.peer_id) == (kind, peer_id))


def closed(
    step: int, committed: bool = True, fragments: tuple[FragmentCommit, ...] = (), reason: str = "all in"
) -> RoundReport:
    return RoundReport(
        round_id=1_000_000 + step,
        outer_step=step,
        committed=committed,
        reason=reason,
        seconds=2.0,
        bytes_in=10,
        bytes_out=5,
        missing=("z",),
        digest="",
        fragments=fragments,
    )


def verdict(peer_id: str, what: Verdict = Verdict.OK, norm: float = 1.0) -> PeerVerdict:
    return PeerVerdict(peer_id=peer_id, verdict=what, norm=norm, weight=0.5 if what is Verdict.OK else 0.0)


def test_a_line_keeps_its_first_and_newest_points_and_never_more_than_it_may() -> None:
    line = Line(most=16)
    for i in range(1000):
        line.add(i, 10.0 * i, -i)
        curve = line.curve("loss", "a")
        assert len(curve.x) <= 17 and curve.x[0] == 0 and curve.x[-1] == i
        assert all(a < b for a, b in pairwise(curve.x))
    assert line.curve("loss", "a").t == tuple(10.0 * x for x in line.curve("loss", "a").x)
    short = line.curve("loss", "a", most=4)
    assert len(short.x) <= 4 + 1 and short.x[-1] == 999
    line.add(1000, 0.0, math.nan)
    line.add(math.inf, 0.0, 1.0)
    line.add(1000, 0.0, 1.7e308)
    assert line.curve("loss", "a").x[-1] == 999


@pytest.mark.parametrize("peers", [2, 12])
def test_who_is_told_only_new_points_has_the_same_curves(peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.control.history._POINTS_IN_ALL", 1280)  # as many curves as 150 peers have are dear
    chance, told, names = random.Random(7), Told(), [f"p{i}" for i in range(peers)]
    have: dict[tuple[str, str], Curve] = {}
    after = sent = 0
    for step in range(1, 700):
        present = names[: max(1, peers * min(step, 300) // 300)]  # they come one after the other
        told.report(chance.choice(present), step, chance.choice([1.0, 2.0, math.nan]))
        if step % 10 == 0:
            told.commit(step, *(verdict(name) for name in present))
        if chance.random() < 0.1:
            news, whole = told.history.curves(after), told.history.curves()
            have = {(one.kind, one.peer_id): one.after(have.get((one.kind, one.peer_id))) for one in news}
            assert tuple(have.values()) == whole
            after = told.history.points
            sent += sum(len(one.x) for one in news) < sum(len(one.x) for one in whole) / 2
    assert sent >= 20


def test_a_loss_that_no_model_has_is_no_point_and_one_that_diverges_is() -> None:
    told = Told()
    for step, loss in enumerate((3.0, 1.7e308, -1.7e308, 1e30, math.inf), 1):
        told.report("a", step, loss)
    assert told.curve("loss", "a").y == (3.0, 1e30)


def test_a_killed_peers_loss_goes_on_where_it_was() -> None:
    """It counts on from its checkpoint, or from 0 without one: its line neither jumps back nor forward."""
    told = Told()
    for steps in (1, 50, 100, 90, 140, 1, 50, 50):
        told.report("a", steps, 3.0)
    told.report("a", 110, math.nan)
    assert told.curve("loss", "a").x == (1.0, 50.0, 100.0, 150.0, 199.0)


def test_verdicts_become_events_and_the_last_one_of_each_peer_is_kept() -> None:
    told = Told()
    told.commit(1, verdict("a"), verdict("b"), verdict("c", Verdict.ANOMALOUS, 40.0))
    (event,) = told.history.events()
    assert (event.number, event.kind, event.peer_id, event.tone) == (1, "rejected", "c", "bad")
    assert event.text == "outer step 1: c has weight 0: norm 40 times that of the others"
    last = told.history.verdict("c")
    assert last is not None and last.verdict == "anomalous"
    absent = told.history.verdict("z")
    assert absent is not None and absent.verdict == "absent"
    assert told.curve("norm", "c").y == (40.0,) and told.curve("round_s").y == (2.0,)
    told.commit(2, verdict("a"))
    assert told.curve("bytes_in").y == (10.0, 20.0)
    assert told.history.verdict("c") == last
    verdicts = (verdict("b"),), (verdict("b", Verdict.NONFINITE),)
    some = [
        FragmentCommit(fragment_id=i, payload=None, verdicts=each, merged_norm=1.0, clip=1.0) for i, each in enumerate(verdicts)
    ]
    told.event(closed(3, fragments=tuple(some)))
    text = told.history.events()[-1].text
    assert text == "outer step 3: b has weight 0 in some fragments: NaN or infinite values in 1 of 2 fragments"
    told.commit(4, verdict("a"), verdict("b", Verdict.NONFINITE, 1.5e19))
    said = told.history.verdict("b")
    assert said is not None and said.reason == "norm 1.5e+19, too long to be compared with others"


def test_members_that_go_and_return_orders_advice_and_aborted_rounds_are_events() -> None:
    told = Told()
    told.event(MemberChanged("a", "training", "heartbeat", live=True))
    told.event(MemberChanged("a", "lost", "the connection broke", live=False))
    told.event(MemberChanged("a", "starting", "attended", live=True))
    told.event(MemberChanged("a", "training", "heartbeat", live=True))
    told.event(MemberChanged("a", "exchanging", "heartbeat", live=True))
    told.event(OrderGiven("paused"))
    told.event(Advised("", "rounds.quorum = 2, but only 1 peer has joined"))
    told.event(closed(7, committed=False, reason="a left"))
    assert [(each.kind, each.peer_id, each.text, each.tone) for each in told.history.events()] == [
        ("member", "a", "a: lost (the connection broke)", "bad"),
        ("member", "a", "a is back", "good"),
        ("order", "", "the operator paused the run", "info"),
        ("run", "", "rounds.quorum = 2, but only 1 peer has joined", "bad"),
        ("round", "", "round 7 aborted: a left", "info"),
    ]
    assert [each.number for each in told.history.events(after=3)] == [4, 5]


def test_one_member_that_comes_and_goes_leaves_room_for_the_events_of_others() -> None:
    told = Told()
    told.event(OrderGiven("paused"))
    for _ in range(20_000):
        told.event(MemberChanged("liar", "lost", "x" * 5000, live=False), after_s=0.01)
    events = told.history.events()
    assert len(events) <= 500 and events[0].text == "the operator paused the run"
    assert max(len(each.text) for each in events) <= 500


def test_shares_of_time_are_of_what_the_peer_did_when_it_reported() -> None:
    told = Told()
    assert told.history.shares("a") == {}
    told.phases["a"] = PeerPhase.COMPUTE
    told.report("a", 1, 3.0)
    for phase, seconds in ((PeerPhase.COMPUTE, 6), (PeerPhase.UPLOAD, 1), (PeerPhase.DOWNLOAD, 1), (PeerPhase.WAITING, 2)):
        told.phases["a"] = phase
        told.report("a", 1, 3.0, after_s=seconds)
    assert told.history.shares("a") == pytest.approx({"computing": 0.6, "exchanging": 0.2, "waiting": 0.2})
    told.event(MemberChanged("a", "lost", "silent", live=False))
    told.report("a", 1, 3.0, after_s=50)  # it was not here
    told.report("a", 1, 3.0, after_s=3600)  # nobody knows
    assert told.history.shares("a")["waiting"] == pytest.approx(0.2)


def test_what_all_peers_did_since_the_commit_before_is_a_curve_of_each_share() -> None:
    told = Told()
    told.phases = {"a": PeerPhase.COMPUTE, "b": PeerPhase.WAITING}
    for peer_id in ("a", "b", "a", "b"):
        told.report(peer_id, 1, 3.0)  # each spent 2 s
    told.phases["a"] = PeerPhase.UPLOAD
    told.report("a", 1, 3.0, after_s=3.0)  # and 4 s
    told.commit(1, verdict("a"))
    told.commit(2, verdict("a"))  # nobody reported
    told.report("b", 1, 3.0)
    told.commit(3, verdict("a"))
    found = {kind: told.curve(kind) for kind in SHARES}
    assert {curve.x for curve in found.values()} == {(1.0, 3.0)}
    assert found["computing"].y == (0.25, 0.0) and found["exchanging"].y == (0.5, 0.0) and found["waiting"].y == (0.25, 1.0)


def test_the_end_is_told_from_the_usual_pace_whatever_a_pause_took() -> None:
    told = Told()
    assert told.history.eta_s(10, 0, told.t) is None
    for step in range(1, 6):
        told.tokens += 100
        told.commit(step, verdict("a"), after_s=600.0 if step == 3 else 10.0)
    assert told.history.eta_s(10, 0, told.t) == pytest.approx(50.0)
    assert told.history.eta_s(10, 0, told.t + 4) == pytest.approx(46.0)
    assert told.history.eta_s(10, 0, told.t + 4000) == 0.0
    assert told.history.eta_s(10, 700, told.t) == pytest.approx(20.0)


def test_where_h_changes_the_end_is_told_by_the_inner_steps_that_are_left() -> None:
    told, sync = Told(), SyncConfig(every=10, milestones=((3, 40),), outer_steps=10)
    for step in range(1, 4):
        told.commit(step, verdict("a"), after_s=10.0)
    assert told.history.eta_s(10, 0, told.t, sync.inner_steps_before) == pytest.approx(7 * 40.0)
    told.commit(4, verdict("a"), after_s=40.0)
    assert told.history.eta_s(10, 0, told.t, sync.inner_steps_before) == pytest.approx(6 * 40.0)


def test_a_held_out_loss_that_a_peer_reports_is_its_curve_by_outer_step_and_is_shared_as_losses_are() -> None:
    told = Told()
    told.commit(1, verdict("a"))
    told.commit(2, verdict("a"))
    for step, value in ((1, 4.0), (1, 4.5), (2, 3.5), (1, 9.0), (1 << 50, 1.0)):
        beat = Heartbeat(state=PeerState.TRAINING, outer_step=step, metrics={"held_out": value, "accuracy": 0.5})
        told.event(PeerReported("a", beat))
    curve = told.curve("held_out", "a")
    assert (curve.x, curve.y) == ((1.0, 2.0), (4.0, 3.5)), "of each step that the run has, one"
    status = replace(busy_run(1), curves=(curve,))
    assert status.shown_to("peer", "b", False).curves == ()
    assert status.shown_to("peer", "a", False).curves == status.shown_to("peer", "b", True).curves == (curve,)
