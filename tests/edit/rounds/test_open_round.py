"""OpenRound keeps its sets by small changes; here they are compared with their definitions. ReadyPeers: who is near the run."""

from hypothesis import given
from hypothesis import strategies as st

from edit.rounds.open_round import OpenRound, ReadyPeers

PEERS = "abcd"
FRAGMENTS = (1, 4)
peers = st.sampled_from(PEERS)
steps = st.one_of(
    st.tuples(st.just("expect"), peers, st.sampled_from((1.0, 5.0, 9.0))),
    st.tuples(st.just("expect_no_more"), peers),
    st.tuples(st.just("deliver"), peers, st.sampled_from(FRAGMENTS)),
    st.tuples(st.just("fault"), peers, st.just("bad")),
    st.tuples(st.just("withdraw"), peers),
)


def opened(ready: dict[str, float]) -> OpenRound:
    current = OpenRound(
        round_id=1,
        outer_step=0,
        quorum=2,
        opened_at=3.0,
        counted_from=3.0,
        welcome_until=3.0,
        deadline=3.0,
        due=FRAGMENTS,
        whole=False,
    )
    for peer_id, seconds in ready.items():
        current.expect(peer_id, seconds)
    return current


@given(st.dictionaries(peers, st.sampled_from((2.0, 7.0))), st.lists(steps, max_size=25))
def test_what_is_kept_is_what_is_meant(ready: dict[str, float], taken: list[tuple[str, str, object]]) -> None:
    current, seconds = opened(ready), dict(ready)
    for name, peer_id, *more in taken:
        if name == "expect" and peer_id not in current.expected and isinstance(more[0], float):
            seconds[peer_id] = more[0]
        if name == "deliver" and peer_id in current.faults:
            continue  # refused before it gets here
        getattr(current, name)(peer_id, *more)
        assert current.complete == set.intersection(*current.delivered.values())
        assert current.longest_wait_s == max((seconds[each] for each in current.missing), default=0.0)
        assert not current.expected & set(current.faults)
    whole = [i for i in FRAGMENTS if current.expected <= current.delivered[i] and len(current.delivered[i]) >= 2]
    assert [reduce.fragment_id for reduce in current.reduce_early()] == whole
    assert current.reduce_early() == [], "each once"


def test_a_round_waits_until_its_slowest_peer_is_overdue() -> None:
    current = opened({"a": 2.0, "b": 7.0})
    assert current.deadline == 10.0
    current.expect("c", 9.0)
    assert (current.deadline, current.longest_wait_s) == (12.0, 9.0)
    current.expect_no_more("c")
    assert (current.deadline, current.longest_wait_s) == (12.0, 7.0)


def test_who_is_expected_again_for_less_is_waited_for_less() -> None:
    test_what_is_kept_is_what_is_meant.hypothesis.inner_test(
        ready={"a": 2.0, "d": 7.0}, taken=[("expect_no_more", "a"), ("expect", "a", 1.0), ("expect_no_more", "d")]
    )


def test_ready_is_who_is_live_and_near_the_run() -> None:
    peers = ReadyPeers(outer_step=5, behind=1)
    for peer_id, step in (("old", 3), ("late", 4), ("here", 5), ("early", 6)):
        peers.report(peer_id, step)
    assert peers.ready == {"late", "here"} and peers.reported("old") == 3 and peers.reported("unknown") is None
    peers.contributes("old", 5)
    peers.contributes("unknown", 4)
    assert peers.ready == {"late", "here", "old"}, "a contribution of a live peer is as good as a report"
    peers.advance(6)
    assert peers.ready == {"here", "old", "early"}
    peers.lost("here")
    assert peers.ready == {"old", "early"} and peers.reported("here") is None
