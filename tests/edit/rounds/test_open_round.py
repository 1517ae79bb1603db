"""The book keeps its sets by small changes; here they are held against their definitions."""

from hypothesis import given
from hypothesis import strategies as st

from edit.rounds.open_round import OpenRound

PEERS = "abcd"
FRAGMENTS = (1, 4)
peers = st.sampled_from(PEERS)
steps = st.one_of(
    st.tuples(st.just("expect"), peers, st.sampled_from((1.0, 5.0, 9.0))),
    st.tuples(st.just("expect_no_more"), peers),
    st.tuples(st.just("deliver"), peers, st.sampled_from(FRAGMENTS)),
    st.tuples(st.just("fault"), peers, st.just("bad")),
)


def opened(ready: dict[str, float]) -> OpenRound:
    delivered: dict[int, set[str]] = {fragment_id: set() for fragment_id in FRAGMENTS}
    book = OpenRound(
        round_id=1,
        outer_step=0,
        quorum=2,
        opened_at=3.0,
        counted_from=3.0,
        welcome_until=3.0,
        deadline=3.0,
        delivered=delivered,
        whole=False,
    )
    book.open_with(ready)
    return book


@given(st.dictionaries(peers, st.sampled_from((2.0, 7.0))), st.lists(steps, max_size=25))
def test_what_is_kept_is_what_is_meant(ready: dict[str, float], taken: list[tuple[str, str, object]]) -> None:
    book, seconds = opened(ready), dict(ready)
    for name, peer_id, *more in taken:
        if name == "expect" and peer_id not in book.expected and isinstance(more[0], float):
            seconds[peer_id] = more[0]
        if name == "deliver" and peer_id in book.faults:
            continue  # refused before it gets here
        getattr(book, name)(peer_id, *more)
        assert book.complete == set.intersection(*book.delivered.values())
        assert book.missing == book.expected - book.complete
        assert book.in_from_all() == [i for i in FRAGMENTS if book.expected <= book.delivered[i]]
        assert book.patience_s == max((seconds[each] for each in book.missing), default=0.0)
        assert not book.expected & set(book.faults)


def test_a_round_waits_until_its_slowest_peer_is_overdue() -> None:
    book = opened({"a": 2.0, "b": 7.0})
    assert (book.deadline, book.punctual) == (10.0, {"a", "b"})
    book.expect("c", 9.0)
    assert (book.deadline, book.punctual, book.patience_s) == (12.0, {"a", "b"}, 9.0)
    book.expect_no_more("c")
    assert (book.deadline, book.patience_s) == (12.0, 7.0)


def test_who_is_expected_again_for_less_is_waited_for_less() -> None:
    test_what_is_kept_is_what_is_meant.hypothesis.inner_test(
        ready={"a": 2.0, "d": 7.0}, taken=[("expect_no_more", "a"), ("expect", "a", 1.0), ("expect_no_more", "d")]
    )
