from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.control.membership import Change, Membership, MemberState, digest_mismatch
from edit.config.run import MembershipConfig
from edit.errors import EvictedError, RefusedError
from editpb.messages import Heartbeat, PeerState
from tests.support.exhaustive import examples

TRAINING = Heartbeat(state=PeerState.TRAINING, outer_step=3)
EXCHANGING = Heartbeat(state=PeerState.EXCHANGING, outer_step=3)
REPLACED = "replaced by a newer connection of the same identity"


@pytest.fixture
def members() -> Membership:
    return Membership(MembershipConfig(heartbeat_s=2.0, lease_s=6.0))


def live(members: Membership) -> set[str]:
    return {peer_id for peer_id, member in members.members.items() if member.live}


def said(changes: list[Change]) -> list[tuple[str, str, str]]:
    return [(change.peer_id, change.state.value, change.reason) for change in changes]


def test_peer_states_and_member_states_share_their_names() -> None:
    assert {state.name for state in PeerState} == {state.name for state in MemberState if state.live}


def test_the_states_follow_the_heartbeats_and_only_changes_are_told(members: Membership) -> None:
    number, changes = members.attended("a", 0.0)
    assert said(changes) == [("a", "starting", "attends")]
    assert said(members.heartbeat("a", number, TRAINING, 1.0)) == [("a", "training", "heartbeat")]
    assert members.heartbeat("a", number, TRAINING, 2.0) == []
    assert said(members.heartbeat("a", number, EXCHANGING, 3.0)) == [("a", "exchanging", "heartbeat")]
    assert members.members["a"].heartbeat == EXCHANGING
    assert live(members) == {"a"}


def test_only_those_are_looked_at_who_may_have_been_silent(members: Membership) -> None:
    for peer_id in "ab":
        members.attended(peer_id, 0.0)
    assert said(members.tick(7.0, ["b"])) == [("b", "lost", "no heartbeat for 7.0 s")]
    assert said(members.tick(7.0)) == [("a", "lost", "no heartbeat for 7.0 s")]


def test_silence_longer_than_the_lease_is_loss_and_a_heartbeat_brings_it_back(members: Membership) -> None:
    number, _ = members.attended("a", 0.0)
    members.heartbeat("a", number, TRAINING, 1.0)
    assert members.tick(7.0) == []
    assert said(members.tick(7.5)) == [("a", "lost", "no heartbeat for 6.5 s")]
    assert members.tick(8.0) == []
    assert live(members) == set()
    assert said(members.heartbeat("a", number, TRAINING, 9.0)) == [("a", "training", "heard again")]


def test_a_connection_that_never_says_anything_is_lost_too(members: Membership) -> None:
    members.attended("a", 0.0)
    assert said(members.tick(6.5)) == [("a", "lost", "no heartbeat for 6.5 s")]


def test_a_busy_data_plane_is_not_silence(members: Membership) -> None:
    number, _ = members.attended("a", 0.0)
    members.heartbeat("a", number, EXCHANGING, 1.0)
    assert members.progress("a", 6.0) == []
    assert members.tick(11.0) == []
    members.tick(13.0)
    assert said(members.progress("a", 14.0)) == [("a", "exchanging", "heard again")]
    members.closed("a", number, "stream closed")
    assert members.progress("a", 16.0) == []
    assert members.progress("nobody", 16.0) == []


def test_a_closed_stream_is_loss_at_once_a_goodbye_is_not(members: Membership) -> None:
    first, _ = members.attended("a", 0.0)
    second, _ = members.attended("b", 0.0)
    assert said(members.closed("a", first, "connection reset")) == [("a", "lost", "connection reset")]
    assert said(members.closed("b", second, "ctrl-c", polite=True)) == [("b", "left", "ctrl-c")]
    assert members.tick(100.0) == []


def test_the_newest_connection_of_an_identity_wins(members: Membership) -> None:
    first, _ = members.attended("a", 0.0)
    members.heartbeat("a", first, TRAINING, 1.0)
    second, changes = members.attended("a", 2.0)
    assert second > first
    assert said(changes) == [("a", "lost", REPLACED), ("a", "starting", "attends")]
    with pytest.raises(RefusedError, match=REPLACED):
        members.heartbeat("a", first, TRAINING, 3.0)
    assert members.closed("a", first, "stream closed") == []
    assert live(members) == {"a"}
    assert said(members.heartbeat("a", second, TRAINING, 4.0)) == [("a", "training", "heartbeat")]


def test_a_lost_peer_attends_again(members: Membership) -> None:
    first, _ = members.attended("a", 0.0)
    members.closed("a", first, "stream closed")
    with pytest.raises(RefusedError):
        members.heartbeat("a", first, TRAINING, 2.0)
    second, changes = members.attended("a", 3.0)
    assert said(changes) == [("a", "starting", "attends")]
    assert members.members["a"].attendance == second


def test_eviction_is_final(members: Membership) -> None:
    number, _ = members.attended("a", 0.0)
    assert said(members.evict("a", "sends rubbish", 1.0)) == [("a", "evicted", "sends rubbish")]
    assert members.evict("a", "again", 2.0) == []
    assert members.closed("a", number, "stream closed") == []
    assert members.tick(100.0) == []
    with pytest.raises(EvictedError, match="sends rubbish"):
        members.attended("a", 3.0)
    assert said(members.evict("never here", "stolen key", 4.0)) == [("never here", "evicted", "stolen key")]


def test_earlier_evictions_hold_after_a_restart() -> None:
    members = Membership(MembershipConfig(), {"a": "sends rubbish"})
    with pytest.raises(EvictedError, match="sends rubbish"):
        members.attended("a", 0.0)


def test_a_committed_round_is_counted(members: Membership) -> None:
    for peer_id in "abc":
        members.attended(peer_id, 0.0)
    members.count(merged=["a", "b"], rejected=["c"], absent=["b", "gone"])
    members.count(merged=["a"])
    counters = {p: (m.contributions, m.rejections, m.absences) for p, m in members.members.items()}
    assert counters == {"a": (2, 0, 0), "b": (1, 0, 1), "c": (0, 1, 0)}


def test_counters_outlive_a_reconnection(members: Membership) -> None:
    members.attended("a", 0.0)
    members.count(merged=["a"])
    members.attended("a", 1.0)
    assert members.members["a"].contributions == 1


@pytest.mark.parametrize(
    ("reported", "own", "resync"),
    [("ab" * 32, "ab" * 32, False), ("", "ab" * 32, False), ("ab" * 32, "", False), ("cd" * 32, "ab" * 32, True)],
)
def test_a_wrong_digest_names_both(reported: str, own: str, resync: bool) -> None:
    reason = digest_mismatch(reported, 4, own)
    assert reason == ("digest cdcdcdcdcdcd at outer step 4, the run has abababababab" if resync else "")


EVENTS = st.lists(
    st.tuples(st.sampled_from(["attend", "heartbeat", "close", "leave", "tick", "evict", "progress"]), st.sampled_from("ab")),
    max_size=40,
)


@settings(deadline=None, max_examples=examples(200))
@given(EVENTS)
def test_every_change_is_told_exactly_once(events: list[tuple[str, str]]) -> None:
    """Whoever only listens to the changes knows every member's state."""
    members, told, numbers = Membership(MembershipConfig(heartbeat_s=1, lease_s=3)), dict[str, MemberState](), dict[str, int]()
    for index, (word, peer_id) in enumerate(events):
        now, changes, number = float(index), list[Change](), numbers.get(peer_id, 0)
        try:
            match word:
                case "attend":
                    numbers[peer_id], changes = members.attended(peer_id, now)
                case "heartbeat":
                    changes = members.heartbeat(peer_id, number, TRAINING, now)
                case "close" | "leave":
                    changes = members.closed(peer_id, number, "end", polite=word == "leave")
                case "tick":
                    changes = members.tick(now)
                case "evict":
                    changes = members.evict(peer_id, "out", now)
                case "progress":
                    changes = members.progress(peer_id, now)
        except (RefusedError, EvictedError):
            continue
        for change in changes:
            assert told.get(change.peer_id) is not change.state
            told[change.peer_id] = change.state
        assert told == {name: member.state for name, member in members.members.items()}
