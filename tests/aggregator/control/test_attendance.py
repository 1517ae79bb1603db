"""Streams come, are replaced and go: which one counts, and what is published."""

from __future__ import annotations

import pytest

from aggregator.control.attendance import Attendance, Attendances
from aggregator.run_feed import Advised, MemberChanged, PeerReported, RankLost, ResyncChanged, RunEvent, RunFeed
from edit.config.run import MembershipConfig
from edit.errors import EvictedError, RefusedError, TransportError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from editpb.messages import Heartbeat, PeerState


def schema(numel: int = 4) -> Schema:
    tensors = (TensorSpec(name="layer.weight", shape=(numel,)),)
    return Schema((FragmentSpec(fragment_id=0, name="layer", tensors=tensors),))


class Site:
    """Attendances, and what they published."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[RunEvent] = []
        feed = RunFeed(lambda: 0.0)
        feed.subscribe(lambda event, unix: self.events.append(event))
        self.attendances = Attendances(MembershipConfig(lease_s=10.0), feed, lambda: self.now)

    def open(self, peer_id: str = "a", rank: int = 0, ranks: int = 1) -> Attendance:
        return self.attendances.open(peer_id, schema(), rank, ranks)

    def news(self) -> list[RunEvent]:
        """What was published since the last call."""
        events, self.events = self.events, []
        return events


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_newer_stream_of_a_rank_replaces_the_older_one(site: Site) -> None:
    older, newer = site.open(), site.open()
    assert isinstance(older.expelled, RefusedError) and "replaced by a newer connection" in str(older.expelled)
    assert older.changed.is_set() and newer.expelled is None
    assert site.attendances.get("a") is newer
    site.news()
    assert not site.attendances.close(older, "the connection broke", polite=False)
    assert site.attendances.get("a") is newer and site.news() == []  # the older one counts no more


def test_a_certificate_that_is_over_by_the_clock_here_is_warned_of_once_and_the_peer_may_come_back(site: Site) -> None:
    ranks = [site.attendances.open("a", schema(), rank, 2, lambda: 86400.0) for rank in range(2)]
    valid = site.open("b")
    site.news()
    for _ in range(2):
        site.attendances.end_expired(86400.0 * 401)
    for each in ranks:
        assert isinstance(each.expelled, TransportError)
        assert str(each.expelled) == (
            "the certificate of a expired on 1970-01-02 00:00 UTC, 400 days ago by the aggregator's clock; "
            "invite the member again, or set that clock if it is wrong"
        )
    assert valid.expelled is None
    (said,) = site.news()
    assert isinstance(said, Advised) and said.peer_id == "a"
    assert said.advice.endswith("by this machine's clock; invite the member again, or set that clock if it is wrong")


def test_a_smaller_replica_expels_the_ranks_that_it_no_longer_has(site: Site) -> None:
    ranks = [site.open(rank=rank, ranks=3) for rank in range(3)]
    site.open(rank=0, ranks=2)
    assert ranks[1].expelled is None
    assert str(ranks[2].expelled) == "the replica has 2 ranks now; rank 2 is none of them"


def test_a_rank_that_breaks_is_lost_and_one_that_leaves_or_is_ended_is_not(site: Site) -> None:
    site.open()
    broken, polite, expelled, ended = (site.open(rank=rank, ranks=5) for rank in range(1, 5))
    expelled.expel(RefusedError("another model"))
    ended.over = True
    site.news()
    site.attendances.close(broken, "the connection broke", polite=False)
    assert site.news() == [RankLost("a", "rank 1: the connection broke")]
    site.attendances.close(polite, "goodbye", polite=True)
    for attendance in (expelled, ended):
        site.attendances.close(attendance, "the connection broke", polite=False)
    assert site.news() == []
    assert [one.rank for one in site.attendances] == [0]


def test_who_is_ended_here_is_not_lost_unless_it_says_goodbye(site: Site) -> None:
    """The peer attends again, at the engine or the process that comes after this one."""
    here, polite = site.open(), site.open("b")
    site.attendances.end()
    site.news()
    site.attendances.close(here, "the connection broke", polite=False)
    assert site.news() == [] and site.attendances.members() == ["b"]
    site.attendances.close(polite, "done", polite=True)
    assert [event.state for event in site.news() if isinstance(event, MemberChanged)] == ["left"]


def test_every_change_of_a_member_is_published_with_its_reason(site: Site) -> None:
    attendance = site.open()
    site.attendances.heartbeat(attendance, Heartbeat(state=PeerState.TRAINING))
    site.now = 11.0
    site.attendances.tick()
    site.attendances.progress("a")
    site.attendances.close(attendance, "done", polite=True)
    changes = [(event.state, event.reason, event.live) for event in site.news() if isinstance(event, MemberChanged)]
    assert changes == [
        ("starting", "attends", True),
        ("training", "heartbeat", True),
        ("lost", "no heartbeat for 11.0 s", False),
        ("training", "heard again", True),
        ("left", "done", False),
    ]


def test_reports_are_published_at_most_once_a_second(site: Site) -> None:
    attendance, beat = site.open(), Heartbeat(state=PeerState.TRAINING)
    site.news()
    for now in (0.0, 0.5, 0.9, 1.0, 1.1, 2.5):
        site.now = now
        site.attendances.heartbeat(attendance, beat)
    assert sum(isinstance(event, PeerReported) for event in site.news()) == 3


def test_a_digest_that_differs_is_published_once_and_once_more_when_it_agrees(site: Site) -> None:
    attendance = site.open()
    site.news()
    attendance.changed.clear()
    for digest in ("b" * 64, "b" * 64, "a" * 64, "a" * 64):
        beat = Heartbeat(state=PeerState.TRAINING, outer_step=3, digest=digest)
        site.attendances.check_digest(attendance, beat, "a" * 64)
    reason = "digest bbbbbbbbbbbb at outer step 3, the run has aaaaaaaaaaaa"
    assert site.news() == [ResyncChanged("a", reason), ResyncChanged("a", "")]
    assert attendance.resync == "" and attendance.changed.is_set()


def test_an_evicted_peer_loses_all_its_streams_and_gets_no_other(site: Site) -> None:
    streams = [site.open(rank=rank, ranks=2) for rank in range(2)]
    other = site.open("b")
    site.attendances.evict("a", "key lost")
    assert all(isinstance(stream.expelled, EvictedError) for stream in streams) and other.expelled is None
    with pytest.raises(EvictedError, match="key lost"):
        site.open()


def test_the_last_report_before_the_end_of_a_stream_is_published_however_soon_it_came(site: Site) -> None:
    attendance = site.open()
    beats = [Heartbeat(state=PeerState.TRAINING, outer_step=step) for step in range(3)]
    for beat in beats:
        site.attendances.heartbeat(attendance, beat)
        site.now += 0.1
    site.attendances.close(attendance, "the run has finished", polite=True)
    reports = [event.heartbeat.outer_step for event in site.news() if isinstance(event, PeerReported)]
    assert reports == [0, 2]
    site.attendances.close(attendance, "again", polite=True)
    assert not any(isinstance(event, PeerReported) for event in site.news())
