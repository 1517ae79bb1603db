"""A round becomes one span with collect, merge and commit in it, when it has closed, with the times at which each happened."""

from __future__ import annotations

from aggregator.run_feed import FragmentMerged, RoundChanged, RoundReport, StepCommitted
from aggregator.telemetry import RoundSpans
from edit.records import ROUNDS_PER_START, Commit
from edit.telemetry import trace_id
from tests.support.telemetry import InMemory, seconds

ROUND = 3 * ROUNDS_PER_START + 2


def report(round_id: int, *, committed: bool, reason: str, took: float) -> RoundReport:
    return RoundReport(
        round_id=round_id,
        outer_step=5,
        committed=committed,
        reason=reason,
        seconds=took,
        bytes_in=700,
        bytes_out=70,
        missing=("b",),
        digest="",
        fragments=(),
    )


def test_a_committed_round() -> None:
    memory = InMemory()
    spans = RoundSpans(memory.telemetry, "run-1", part=1)
    commit = Commit(round_id=ROUND, outer_step=5, digest="", reason="", fragments=())
    for event, unix in (
        (RoundChanged("collecting", ROUND), 100.0),
        (FragmentMerged(ROUND, 0, 2, 0.5), 104.0),
        (FragmentMerged(ROUND, 1, 2, 0.25), 106.0),
        (RoundChanged("committing", ROUND), 106.0),
        (StepCommitted(commit, ("b",)), 107.5),
        (report(ROUND, committed=True, reason="all", took=8.0), 108.0),
        (RoundChanged("collecting", ROUND + 1), 108.0),
    ):
        spans.on_event(event, unix)  # type: ignore[arg-type]
    (whole,) = memory.spans("round")
    assert seconds(whole) == (100.0, 108.0) and whole.status.is_ok
    told = dict(whole.attributes or {})
    assert (told["edit.round"], told["edit.outer_step"], told["edit.part"], told["edit.missing"]) == (2, 5, 1, 1)
    assert [seconds(memory.spans(name)[0]) for name in ("collect", "commit")] == [(100.0, 106.0), (106.0, 107.5)]
    assert [seconds(span) for span in memory.spans("merge")] == [(103.5, 104.0), (105.75, 106.0)]
    inside = [*memory.spans("collect"), *memory.spans("merge"), *memory.spans("commit")]
    assert whole.context is not None and whole.context.trace_id == trace_id("run-1", 5)
    assert {span.parent.span_id for span in inside if span.parent} == {whole.context.span_id} and len(inside) == 4
    (took,), (received,) = memory.points("edit.round.duration"), memory.points("edit.round.received")
    assert (took.count, took.sum, received.value) == (1, 8.0, 700)


def test_a_round_that_is_lost_has_its_reason_and_leaves_nothing_for_the_next() -> None:
    memory = InMemory()
    spans = RoundSpans(memory.telemetry, "run-1")
    spans.on_event(RoundChanged("collecting", ROUND), 10.0)
    spans.on_event(FragmentMerged(ROUND - 1, 0, 2, 0.5), 11.0)  # of a round that is over
    spans.on_event(report(ROUND, committed=False, reason="1 of quorum 2\x1b[31m", took=3.0), 13.0)
    (whole,) = memory.spans("round")
    assert not whole.status.is_ok and whole.status.description == "1 of quorum 2 [31m"
    assert not memory.spans("merge") and not memory.spans("commit") and seconds(memory.spans("collect")[0]) == (10.0, 13.0)
    for fragment in range(2000):  # one who says that more happened than can be is not remembered
        spans.on_event(RoundChanged("collecting", ROUND + 1), 14.0)
        spans.on_event(FragmentMerged(ROUND + 1, fragment, 2, 0.5), 15.0)
    spans.on_event(report(ROUND + 1, committed=True, reason="all", took=3.0), 17.0)
    assert len(memory.spans("merge")) == 1024
