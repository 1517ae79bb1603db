"""The session's tables, line by line. The clock is a number, the random source a constant."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from edit.errors import LocalProtocolError
from editpb.messages import Expel, RunPhase, View, Welcome
from peers.carriers.hub.session import HAS_PARAMETERS, MOST_PASSED_OVER, NEVER, Asked, Decision, Sent, Session

WELCOME = Welcome(run_id="run-1", peer_id="a", config_json="{}")


def view(outer_step: int = 5, *, phase: RunPhase = RunPhase.COLLECTING, sequence: int = 1, **rest: object) -> View:
    return View(sequence=sequence, phase=phase, outer_step=outer_step, **rest)  # type: ignore[arg-type]


def attending(*views: View, now: float = 0.0, max_staleness: int = 0) -> Session:
    session = Session(lambda: 0.5, now, heartbeat_s=1.0, max_staleness=max_staleness)
    session.connecting()
    assert session.welcomed(WELCOME) is None
    for each in views:
        assert session.viewed(each) is None
    return session


# what became of outer step 5, having contributed to round 1000007 (or to none)
R = 1_000_007
G = 2_000_000  # of another grant of a swarm
TABLE = [
    # view, contributed, decision, a word of the reason
    (view(round_id=R), R, Decision.WAIT, "collecting"),
    (view(round_id=R), 0, Decision.WAIT, "collecting"),
    (view(round_id=R + 3), 0, Decision.WAIT, "collecting"),
    (view(phase=RunPhase.COMMITTING, round_id=R), R, Decision.WAIT, "committing"),
    (view(phase=RunPhase.GATHERING), R, Decision.WAIT, "gathering"),
    (view(phase=RunPhase.PAUSED), 0, Decision.WAIT, "paused"),
    (view(6, oldest_update=6), R, Decision.COMMITTED, "outer step 6"),
    (view(6, oldest_update=6), 0, Decision.COMMITTED, "outer step 6"),
    (view(9, oldest_update=6), R, Decision.COMMITTED, "outer step 9"),
    (view(9, oldest_update=7), R, Decision.BEHIND, "oldest is 7"),
    (view(6, phase=RunPhase.FINISHED, oldest_update=6), R, Decision.COMMITTED, "outer step 6"),
    (view(phase=RunPhase.FINISHED), R, Decision.FINISHED, "finished"),
    (view(phase=RunPhase.FINISHED), 0, Decision.FINISHED, "finished"),
    (view(4), R, Decision.BEHIND, "at outer step 4"),
    (view(resync="digest differs"), R, Decision.BEHIND, "digest differs"),
    (view(6, resync="digest differs", oldest_update=6), 0, Decision.BEHIND, "digest differs"),
    (view(round_id=R + 1, last_round_id=R, last_reason="too few"), R, Decision.ABORTED, "too few"),
    (view(phase=RunPhase.GATHERING, last_round_id=R), R, Decision.ABORTED, "was lost"),
    (view(round_id=R + 1, last_round_id=R, last_reason="too few"), R + 1, Decision.WAIT, "collecting"),
    (view(round_id=2_000_001), R, Decision.ABORTED, "round 7 of an earlier start was lost; round 1 is open"),
    (view(round_id=R + 1, last_round_id=R, last_reason="too few"), 0, Decision.WAIT, "collecting"),
]


@pytest.mark.parametrize(("seen", "contributed", "decision", "word"), TABLE)
def test_decision_table(seen: View, contributed: int, decision: Decision, word: str) -> None:
    got, reason = attending(seen).decide(5, Sent(contributed, 5), now=100.0)
    assert got is decision
    assert word in reason


# S = 2: what became of outer step 5, this peer's contribution naming round R
CARRIED = [
    # view, contribution, decision, a word of the reason
    (view(round_id=R), Sent(R, 5), Decision.WAIT, "collecting"),
    (view(round_id=R + 4, last_round_id=R + 3, last_reason="too few"), Sent(R, 5), Decision.WAIT, "collecting"),
    (view(round_id=R + 4, last_round_id=R + 3, last_reason="too few"), Sent(R, 3), Decision.WAIT, "collecting"),
    (view(round_id=R + 4), Sent(R, 2), Decision.ABORTED, "too stale at 5"),
    (view(round_id=R + 4), Sent(0, 2), Decision.ABORTED, "too stale at 5"),
    (view(round_id=R + 4), Sent(R, 4, 5, "in already"), Decision.ABORTED, "in already"),
    (view(round_id=R + 4), Sent(R, 4, 6, "in already"), Decision.WAIT, "collecting"),
    (view(6, oldest_update=6), Sent(R, 4, 6, "in already"), Decision.COMMITTED, "outer step 6"),
    (view(6, oldest_update=6), Sent(R, 2), Decision.COMMITTED, "outer step 6"),
    (view(phase=RunPhase.FINISHED), Sent(R, 5), Decision.FINISHED, "finished"),
    (view(4), Sent(R, 4), Decision.BEHIND, "at outer step 4"),
]


@pytest.mark.parametrize(("seen", "sent", "decision", "word"), CARRIED)
def test_decision_table_where_contributions_outlive_rounds(seen: View, sent: Sent, decision: Decision, word: str) -> None:
    got, reason = attending(seen, max_staleness=2).decide(5, sent, now=100.0)
    assert got is decision
    assert word in reason


@pytest.mark.parametrize(
    ("sent", "past"),
    [
        (None, []),
        (Sent(R, 5), [6, 7]),
        (Sent(0, 5), [6, 7]),
        (Sent(R, 4), [5, 6]),
        (Sent(R, 5, 6, "refused"), []),
        (Sent(R, 5, 7, "refused"), [6]),
    ],
)
def test_a_contribution_is_carried_past_the_commits_that_a_later_one_may_follow_with_it(
    sent: Sent | None, past: list[int]
) -> None:
    session = attending(view(9), max_staleness=2)
    assert [step for step in range(sent.outer_step + 1 if sent else 0, 10) if session.carried_past(step, sent)] == past
    assert not attending(view(9)).carried_past(6, sent)


def test_what_may_be_stale_goes_to_whatever_round_is_open() -> None:
    session = attending(view(5, round_id=R), max_staleness=2)
    assert [session.open_round(step) for step in (2, 3, 4, 5, 6)] == [0, R, R, R, 0]
    session.viewed(view(7, phase=RunPhase.PAUSED, sequence=2))
    assert session.takes(R) and session.aborted_since(R) == 0
    session.viewed(view(7, round_id=R + 2, last_round_id=R + 1, sequence=3))
    assert session.aborted_since(R) == R + 1 and session.aborted_since(R + 2) == 0
    session.viewed(view(7, round_id=R + 2, last_round_id=R + 1, last_committed=True, sequence=4))
    assert session.aborted_since(R) == 0


@pytest.mark.parametrize(
    ("expel", "decision"),
    [(Expel(evicted=True, reason="noisy"), Decision.EVICTED), (Expel(evicted=False, reason="another model"), Decision.REFUSED)],
)
def test_an_expelled_peer_stays_expelled(expel: Expel, decision: Decision) -> None:
    session = attending(view(6, oldest_update=1))
    session.expelled(expel)
    session.expelled(Expel(evicted=not expel.evicted, reason="second word"))
    session.down(1.0)
    assert session.decide(5, Sent(R, 5), now=99.0) == (decision, expel.reason)
    assert session.reconnect_delay() is None
    with pytest.raises(LocalProtocolError):
        session.connecting()


def test_every_state_answers_every_question() -> None:
    """No combination of phase, step, rounds and resync is without an answer, and only a newer step counts as committed."""
    steps, rounds = (4, 5, 6, 9), (0, R - 1, R, R + 1)
    for phase, step, open_round, last, resync, mine in itertools.product(RunPhase, steps, rounds, rounds, ("", "bad"), (0, R)):
        seen = view(step, phase=phase, round_id=open_round, last_round_id=last, resync=resync, oldest_update=6)
        decision, reason = attending(seen).decide(5, Sent(mine, 5), now=0.0)
        assert reason
        assert (decision is Decision.COMMITTED) == (step > 5 and not resync)
        if decision is Decision.ABORTED:
            assert mine and step == 5 and max(open_round, last) >= mine


def waits_for(session: Session) -> str:
    """The last word of what the session gives as the reason to wait."""
    decision, reason = session.decide(5, None, now=0.0)
    assert decision is Decision.WAIT
    return reason.split()[-1]


def test_the_link_follows_its_table() -> None:
    session = Session(lambda: 0.5, 0.0)
    seen = [waits_for(session)]
    session.connecting()
    seen.append(waits_for(session))
    session.welcomed(WELCOME)
    seen.append(waits_for(session))
    session.viewed(view())
    seen.append(waits_for(session))
    session.down(0.0)
    seen.append(waits_for(session))
    assert seen == ["offline", "greeting", "welcomed", "collecting", "offline"]


def test_messages_out_of_order_are_named_not_taken() -> None:
    session = Session(lambda: 0.5, 0.0)
    assert "offline" in (session.welcomed(WELCOME) or "")
    session.connecting()
    assert "greeting" in (session.viewed(view()) or "")
    with pytest.raises(LocalProtocolError, match="greeting"):
        session.connecting()
    session.welcomed(WELCOME)
    assert "welcomed" in (session.welcomed(WELCOME) or "")


def test_another_run_is_not_welcome() -> None:
    session = attending(view())
    session.down(1.0)
    session.connecting()
    other = Welcome(run_id="run-2", peer_id="a", config_json="{}")
    assert "run-2" in (session.welcomed(other) or "")
    assert "greeting" in (session.viewed(view()) or "")


def test_a_view_overtaken_by_a_newer_one_is_dropped() -> None:
    session = attending(view(6, sequence=9, oldest_update=1), view(5, sequence=8))
    assert session.view is not None and session.view.outer_step == 6
    session.viewed(view(7, sequence=10, oldest_update=1))
    assert session.view.outer_step == 7


def test_a_restarted_coordinator_may_count_its_views_anew() -> None:
    session = attending(view(6, sequence=900, oldest_update=1))
    session.down(1.0)
    session.connecting()
    session.welcomed(WELCOME)
    assert session.view is None
    session.viewed(view(6, sequence=1, oldest_update=6))
    assert session.view is not None and session.view.sequence == 1


def test_a_heal_is_obeyed_once() -> None:
    session = attending(view(resync="digest differs", sequence=3, round_id=R))
    assert session.open_round(5) == 0
    session.resynced()
    assert session.decide(5, None, now=0.0)[0] is Decision.WAIT
    assert session.open_round(5) == R
    session.viewed(view(resync="still differs", sequence=4, round_id=R))
    assert session.decide(5, None, now=0.0) == (Decision.BEHIND, "still differs")


def test_a_heal_after_an_all_clear_counts_even_at_the_same_sequence() -> None:
    session = attending(view(resync="digest differs", sequence=3))
    session.resynced()
    session.viewed(view(sequence=3))
    session.viewed(view(resync="differs again", sequence=3))
    assert session.decide(5, None, now=0.0) == (Decision.BEHIND, "differs again")


def test_cut_off_only_after_two_heartbeats() -> None:
    session = attending(view(round_id=R))
    session.down(10.0)
    assert session.view is None
    assert session.decide(5, Sent(R, 5), now=12.0)[0] is Decision.WAIT
    decision, reason = session.decide(5, Sent(R, 5), now=12.5)
    assert decision is Decision.CUT_OFF and "no connection" in reason
    session.connecting()
    session.down(13.0)  # a failed attempt does not reset the count
    assert session.cut_off(12.5)
    session.connecting()
    session.welcomed(WELCOME)
    assert not session.cut_off(99.0)
    assert session.decide(5, Sent(R, 5), now=99.0)[0] is Decision.WAIT
    session.viewed(view(6, oldest_update=6))
    assert session.decide(5, Sent(R, 5), now=99.0)[0] is Decision.COMMITTED


def test_in_a_swarm_it_is_not_cut_off_while_another_host_takes_over() -> None:
    session = Session(lambda: 0.5, 0.0, heartbeat_s=0.5, follows=True)
    assert not session.cut_off(4.0) and session.cut_off(4.1)
    session.configure(10.0)
    assert not session.cut_off(20.0) and session.cut_off(20.1)


def test_configure_changes_the_patience() -> None:
    session = Session(lambda: 0.0, 0.0, heartbeat_s=1.0)
    session.configure(10.0)
    assert not session.cut_off(20.0)
    assert session.cut_off(20.1)


@pytest.mark.parametrize(
    ("max_staleness", "leads", "before", "after", "named", "expected"),
    [
        (0, True, 0, 0, 0, R),  # the open round
        (0, True, 0, R, 0, 0),  # an earlier contribution named it
        (0, True, R - 1, 0, 0, R - 1),  # rank 0 stays
        (0, False, R - 1, 0, 0, R),  # another rank follows
        (0, False, R, 0, 0, R),
        (0, False, R, R, 0, R),  # nothing newer is open
        (2, True, 0, 0, 0, R),
        (2, True, R - 1, 0, R, R - 1),  # the name stays, whoever says what
        (2, False, R - 1, 0, R, R - 1),
        (2, False, 0, 0, 0, 0),  # rank 0 has not said any
        (2, False, 0, 0, R - 2, R - 2),  # closed or not
        (2, False, 0, R - 2, R - 2, 0),  # said of an earlier contribution
    ],
)
def test_which_round_a_contribution_names(
    max_staleness: int, leads: bool, before: int, after: int, named: int, expected: int
) -> None:
    session = attending(view(round_id=R), max_staleness=max_staleness)
    assert session.name_round(Sent(before, 5), after, leads=leads, named=named) == expected


def follower(seen: View, *, first_round_id: int = G + 1, max_staleness: int = 0) -> Session:
    """A session in a swarm, at the second host that serves the run."""
    session = Session(lambda: 0.5, 0.0, max_staleness=max_staleness, follows=True)
    for first in (1, first_round_id):
        session.connecting()
        assert session.welcomed(dataclasses.replace(WELCOME, first_round_id=first)) is None
        session.down(0.0)
    session.connecting()
    session.welcomed(dataclasses.replace(WELCOME, first_round_id=first_round_id))
    session.viewed(seen)
    return session


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize(
    "seen",
    [view(round_id=G + 1), view(phase=RunPhase.GATHERING), view(round_id=G + 3, last_round_id=G + 2, last_reason="too few")],
)
def test_what_another_host_did_not_commit_is_waited_for_where_contributions_follow(seen: View, max_staleness: int) -> None:
    session = follower(seen, max_staleness=max_staleness)
    assert session.decide(5, Sent(7, 5), now=0.0)[0] is Decision.WAIT
    assert session.outlived(7) and not session.outlived(G + 1) and not session.outlived(0)
    assert not session.takes(7)
    if seen.last_round_id and not max_staleness:
        assert session.decide(5, Sent(G + 2, 5), now=0.0) == (Decision.ABORTED, "too few"), "a round of this host's was lost"


@pytest.mark.parametrize(
    ("max_staleness", "leads", "position", "named", "expected"),
    [
        (0, True, 5, 0, G + 4),
        (0, False, 5, 0, G + 4),
        (2, True, 5, 0, G + 4),
        (2, True, 4, 0, 7),  # a commit that this peer has not looked at may have it
        (2, False, 5, 0, 7),  # rank 0 has not said any
        (2, False, 5, 7, 7),  # nor yet
        (2, False, 5, G + 2, G + 2),
    ],
)
def test_a_contribution_names_a_round_of_the_host_that_serves_the_run_now(
    max_staleness: int, leads: bool, position: int, named: int, expected: int
) -> None:
    session = follower(view(round_id=G + 4), max_staleness=max_staleness)
    assert session.name_round(Sent(7, 5), 6, position, leads=leads, named=named) == expected
    hub = attending(view(round_id=G + 4), max_staleness=max_staleness)
    assert not hub.outlived(7) and hub.name_round(Sent(7, 5), 6, position) == 7


def test_a_host_that_served_before_another_one_is_passed_over_but_not_for_ever() -> None:
    """It was stopped, and has not heard. But who said that it came later may have lied."""
    session = follower(view())
    for _ in range(MOST_PASSED_OVER):
        session.down(0.0)
        session.connecting()
        assert "another host" in (session.welcomed(dataclasses.replace(WELCOME, first_round_id=1)) or "")
        assert session.outlived(7)
        session.down(0.0)
        session.connecting()
    assert session.welcomed(dataclasses.replace(WELCOME, first_round_id=1)) is None
    assert not session.outlived(7)


def test_open_round_asks_for_the_step_the_phase_and_a_newer_round() -> None:
    assert attending(view(round_id=R)).open_round(5) == R
    assert attending(view(round_id=R)).open_round(5, after=R - 1) == R
    assert attending(view(round_id=R)).open_round(5, after=R) == 0
    assert attending(view(round_id=R)).open_round(4) == 0
    assert attending(view(round_id=R)).open_round(6) == 0
    assert attending(view(phase=RunPhase.PAUSED, round_id=R)).open_round(5) == 0
    offline = attending(view(round_id=R))
    offline.down(0.0)
    assert offline.open_round(5) == 0


def test_founding_follows_the_newest_word() -> None:
    session = Session(lambda: 0.5, 0.0)
    session.connecting()
    assert session.founding(NEVER) is None
    session.welcomed(WELCOME)
    assert session.founding(NEVER) is None
    session.viewed(view(0, phase=RunPhase.FOUNDING, found=True, sequence=0))
    assert session.founding(NEVER) == Asked(1, 0)
    assert session.founding(Asked(1, 0)) is None
    session.viewed(view(0, phase=RunPhase.FOUNDING, found=False, sequence=1))
    assert session.founding(NEVER) is None
    session.viewed(view(0, phase=RunPhase.FOUNDING, found=True, sequence=2))
    assert session.founding(Asked(1, 0)) == Asked(1, 2)
    assert session.founding(Asked(1, 0).end_of_connection()) is None
    session.viewed(view(0, phase=RunPhase.GATHERING, found=True, sequence=3))
    assert session.founding(Asked(1, 0).end_of_connection()) is HAS_PARAMETERS


def test_founding_is_asked_again_over_a_new_connection() -> None:
    session = Session(lambda: 0.5, 0.0)
    session.connecting()
    session.welcomed(WELCOME)
    session.viewed(view(0, phase=RunPhase.FOUNDING, found=True, sequence=0))
    session.down(1.0)
    assert session.founding(NEVER) is None
    session.connecting()
    session.welcomed(WELCOME)
    assert session.founding(NEVER) is None
    session.viewed(view(0, phase=RunPhase.FOUNDING, found=True, sequence=0))
    assert session.founding(Asked(1, 0).end_of_connection()) == Asked(2, 0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(0, phase=RunPhase.FOUNDING), False),
        (view(0, phase=RunPhase.GATHERING), False),
        (view(0, phase=RunPhase.PAUSED), False),
        (view(0, round_id=R), True),
        (view(0, phase=RunPhase.COMMITTING), True),
        (view(0, phase=RunPhase.FINISHED), True),
        (view(3, phase=RunPhase.GATHERING), True),
        (view(3, phase=RunPhase.PAUSED), True),
    ],
)
def test_training_starts_with_the_first_round_or_in_a_run_under_way(seen: View, expected: bool) -> None:
    assert attending(seen).under_way is expected


def test_a_round_takes_bytes_until_a_view_or_an_expel_says_otherwise() -> None:
    session = attending(view(round_id=R))
    assert session.takes(R) and not session.takes(R - 1)
    session.viewed(view(phase=RunPhase.COMMITTING, round_id=R, sequence=2))
    assert session.takes(R)
    session.down(1.0)
    assert session.takes(R)
    session.expelled(Expel(evicted=True, reason="x"))
    assert not session.takes(R)


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_delays_double_from_a_fifth_of_a_second_to_five_and_start_anew_once_welcomed(draw: float) -> None:
    session = Session(lambda: draw, 0.0)
    delays = []
    for _ in range(12):
        session.connecting()
        session.down(0.0)
        delays.append(session.reconnect_delay() or 0.0)
    assert all(0.2 <= delay <= 5.0 for delay in delays)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(5.0 * (1 + draw) / 2)
    session.connecting()
    session.welcomed(WELCOME)
    session.down(0.0)
    assert (session.reconnect_delay() or 9.0) <= 0.2
