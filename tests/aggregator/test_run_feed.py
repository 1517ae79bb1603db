"""What is published reaches every subscriber; the log and metrics.jsonl are two of them."""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from aggregator import run_feed
from aggregator.metrics import MetricsLog
from aggregator.run_feed import (
    Advised,
    Approved,
    CertificateRenewed,
    Consented,
    ContributionRefused,
    EventLog,
    FragmentMerged,
    MachineReplaced,
    MemberChanged,
    MemberEnrolled,
    OrderGiven,
    PeerFaulted,
    PeerQuarantined,
    PeerReported,
    RankLost,
    ResyncChanged,
    RoundChanged,
    RunEnded,
    RunEvent,
    RunFeed,
    RunFounded,
    StepCommitted,
)
from edit.records import Commit, FragmentCommit, PeerVerdict, Verdict
from edit.rounds.deadlines import PeerPhase
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import RoundReport

VERDICTS = (
    PeerVerdict(peer_id="a", verdict=Verdict.OK, norm=2.0, weight=1.0, staleness=1),
    PeerVerdict(peer_id="b", verdict=Verdict.NONFINITE, norm=math.nan, weight=0.0),
)
REPORT = RoundReport(
    round_id=7,
    outer_step=3,
    committed=True,
    reason="all 2 contributors in",
    seconds=1.23456,
    bytes_in=10,
    bytes_out=5,
    missing=("c",),
    digest="d" * 64,
    fragments=(FragmentCommit(fragment_id=0, payload=None, verdicts=VERDICTS, merged_norm=math.inf, clip=1.0),),
    carried=("d",),
    every=8,
    batch=4,
    outer_lr=0.7,
    outer_momentum=0.6,
)
BEAT = Heartbeat(state=PeerState.TRAINING, outer_step=3, digest="d" * 64, step_s=0.5)
LINES: list[tuple[RunEvent, str]] = [
    (MemberEnrolled("a", "peer"), "INFO a enrolled as peer"),
    (CertificateRenewed("a"), "INFO a: its certificate is renewed"),
    (MachineReplaced("a", "replaced"), "INFO a: enrolled for another key; the machine before is shut out"),
    (MemberChanged("a", "lost", "no heartbeat for 9 s", live=False), "INFO a: lost (no heartbeat for 9 s)"),
    (MemberChanged("a", "training", "heartbeat", live=True), ""),
    (Consented("a", ""), "INFO a: its site consents to the configuration"),
    (Consented("a", "ab12"), "INFO a: its site consents to the configuration under a policy of its own, sha256:ab12"),
    (Approved("ann", "waiting for bob"), "INFO ann approves the changed configuration: waiting for bob"),
    (RankLost("a", "rank 1: the connection broke"), "INFO a: lost to the round (rank 1: the connection broke)"),
    (PeerReported("a", BEAT, PeerPhase.COMPUTE), ""),
    (ResyncChanged("a", "digest x"), "WARNING a: digest x"),
    (ResyncChanged("a", ""), "WARNING a: resynced"),
    (RunFounded("a", 12, 2), "INFO a founded the run: 12 parameters in 2 fragments"),
    (RoundChanged("collecting", 7), ""),
    (ContributionRefused("a", "too stale"), "INFO a: its contribution is refused: too stale"),
    (PeerFaulted("a", 7, "a gap"), "WARNING a: a gap"),
    (
        PeerQuarantined("a", 60.0, "a gap"),
        "WARNING a: quarantined for 60 s, its bytes were bad too often: a gap",
    ),
    (FragmentMerged(7, 0, 2, 0.5), ""),
    (StepCommitted(Commit(outer_step=3, round_id=7, digest="", reason="", fragments=()), ()), ""),
    (REPORT, "INFO round 7 committed: all 2 contributors in (1.23 s)"),
    (RunEnded(3, 100), "INFO finished at outer step 3, 100 tokens"),
    (OrderGiven("paused"), "INFO the operator paused the run"),
    (OrderGiven("evicted", "a", "key lost"), ""),  # MemberChanged says it
    (Advised("a", "too slow"), "WARNING a: too slow"),
    (Advised("", "no quorum"), "WARNING no quorum"),
]


def test_every_kind_of_event_is_decided_here() -> None:
    assert {type(event) for event, _ in LINES} == set(get_args(run_feed.RunEvent))


@pytest.mark.parametrize(("event", "line"), LINES, ids=lambda value: type(value).__name__)
def test_the_log_has_one_line_for_what_an_operator_wants_to_read(
    event: RunEvent, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        EventLog().on_event(event, 0.0)
    assert [f"{record.levelname} {record.getMessage()}" for record in caplog.records] == ([line] if line else [])


def said(events: list[tuple[float, RunEvent]], caplog: pytest.LogCaptureFixture) -> list[str]:
    log = EventLog()
    with caplog.at_level(logging.INFO):
        for unix, event in events:
            log.on_event(event, unix)
    return [record.getMessage() for record in caplog.records]


def test_what_a_member_repeats_has_one_line_a_second_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[tuple[float, RunEvent]] = [(0.001 * i, PeerFaulted("a", i, f"gap {i}")) for i in range(1500)]
    assert said([*faults, (9.0, PeerFaulted("a", 7, "gap"))], caplog) == [
        "a: gap 0",
        "a: gap 1000 (999 more like this before)",
        "a: gap (499 more like this before)",
    ]


def test_other_members_and_kinds_have_lines_of_their_own_and_every_commit_has_one(caplog: pytest.LogCaptureFixture) -> None:
    aborted = replace(REPORT, committed=False, reason="few")
    mixed = [PeerFaulted("a", 1, "gap"), PeerFaulted("b", 1, "gap"), ContributionRefused("a", "old")]
    mixed += [REPORT, REPORT, aborted, aborted]
    assert said([(0.0, event) for event in mixed], caplog) == [
        "a: gap",
        "b: gap",
        "a: its contribution is refused: old",
        "round 7 committed: all 2 contributors in (1.23 s)",
        "round 7 committed: all 2 contributors in (1.23 s)",
        "round 7 aborted: few (1.23 s)",
    ]


def test_a_clock_that_goes_back_silences_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert len(said([(100.0, PeerFaulted("a", 1, "gap")), (5.0, PeerFaulted("a", 1, "gap"))], caplog)) == 2


def test_advice_is_never_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert said([(0.0, Advised("a", "slow")), (0.0, Advised("a", "ahead"))], caplog) == ["a: slow", "a: ahead"]


def test_metrics_have_a_line_for_each_round_change_of_a_member_and_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files)
        for event, _ in LINES:
            log.on_event(event, 5.12345)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["member", "member", "peer", "round", "end"]
    assert lines[4] == {"kind": "end", "t": 5.123, "outer_step": 3, "tokens": 100}
    assert {line["t"] for line in lines} == {5.123}
    assert lines[0] == {"kind": "member", "t": 5.123, "peer_id": "a", "state": "lost", "reason": "no heartbeat for 9 s"}
    assert lines[2] == {
        "kind": "peer",
        "t": 5.123,
        "peer_id": "a",
        "state": "training",
        "outer_step": 3,
        "inner_steps": 0,
        "loss": None,
        "tokens_per_s": 0.0,
        "step_s": 0.5,
        "bytes_sent": 0,
        "bytes_received": 0,
        "digest": "d" * 64,
        "metrics": {},
        "phase": "compute",
    }
    assert lines[3] == {
        "kind": "round",
        "t": 5.123,
        "round_id": 7,
        "outer_step": 3,
        "committed": True,
        "reason": "all 2 contributors in",
        "seconds": 1.2346,
        "bytes_in": 10,
        "bytes_out": 5,
        "missing": ["c"],
        "carried": ["d"],
        "digest": "d" * 64,
        "every": 8,
        "batch": 4,
        "outer_lr": 0.7,
        "outer_momentum": 0.6,
        "verdicts": [
            {
                "fragment_id": 0,
                "merged_norm": None,
                "clip": 1.0,
                "peers": {"a": ["ok", 2.0, 1.0], "b": ["nonfinite", None, 0.0]},
                "staleness": {"a": 1},
            }
        ],
    }


def test_subscribers_are_told_at_once_and_in_order() -> None:
    feed, told = RunFeed(lambda: 7.5), []
    feed.publish(OrderGiven("paused"))  # nobody listens yet

    def first(event: RunEvent, unix: float) -> None:
        told.append(("first", event, unix))
        if event == OrderGiven("drained"):
            feed.publish(RunEnded(3, 0))

    feed.subscribe(first)
    feed.subscribe(lambda event, unix: told.append(("second", event, unix)))
    feed.publish(OrderGiven("drained"))
    assert told == [
        ("first", OrderGiven("drained"), 7.5),
        ("first", RunEnded(3, 0), 7.5),
        ("second", RunEnded(3, 0), 7.5),
        ("second", OrderGiven("drained"), 7.5),
    ]
