"""A traced connection answers as the one inside, and records each exchange from its first fragment to its outcome."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from edit.config.run import RunConfig
from edit.records import Aborted, Commit, Committed, Contribution, EncodedTensor, Evicted, Finished, Outcome
from edit.telemetry import trace_id
from peers.training.exchange_spans import TracedCollective
from peers.training.metrics import Metrics
from tests.peers.training.test_loop import LocalConnection, LocalRun, training
from tests.support.telemetry import InMemory, seconds


def test_a_training_is_the_same_traced_and_each_outer_step_is_an_exchange(tmp_path: Path) -> None:
    config = RunConfig.from_mapping(
        {
            "model": {"layers": 1, "heads": 1, "width": 8, "context": 16},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "sync": {"every": 2, "outer_steps": 3},
        }
    )
    digests, memory = [], InMemory()
    for number, told in enumerate((None, memory.telemetry)):
        home = tmp_path / str(number)
        home.mkdir()
        run = LocalRun(config, ["a"])
        with Metrics(None) as metrics:
            training(home, LocalConnection(run, "a"), config, metrics, telemetry=told).run(0)
        digests.append(run.state.digest)
    assert digests[0] == digests[1]
    exchanges = memory.spans("exchange")
    assert [(span.attributes or {})["edit.outer_step"] for span in exchanges] == [1, 2, 3]
    assert {(span.attributes or {})["edit.outcome"] for span in exchanges} == {"committed"}
    assert [span.context.trace_id for span in exchanges if span.context] == [trace_id("run-1", step) for step in (1, 2, 3)]
    assert len(memory.spans("wait")) == 3 and len(memory.spans("join")) == 1
    assert sum(point.value for point in memory.points("edit.exchange.payload")) > 0


class Scripted:
    """Answers what it is told to."""

    peer_id = "a"

    def __init__(self, *answers: Outcome | None) -> None:
        self.answers = list(answers)

    def contribute(self, contribution: Contribution) -> None: ...

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        return self.answers.pop(0)


COMMIT = Commit(round_id=1, outer_step=1, digest="", reason="", fragments=())


def fragment(number: int) -> Contribution:
    payload = EncodedTensor("fp32", 2, bytes(8))
    return Contribution(outer_step=0, fragment_id=number, inner_steps=1, tokens=1, payload=payload)


@pytest.mark.parametrize(
    ("outcome", "result", "reason"),
    [
        (Committed(COMMIT), "committed", None),
        (Aborted("1 of quorum 2"), "aborted", "1 of quorum 2"),
        (Evicted("by the operator"), "evicted", "by the operator"),
        (Finished(1), "finished", None),
    ],
)
def test_it_ends_with_the_outcome_however_often_that_is_asked_for(outcome: Outcome, result: str, reason: str | None) -> None:
    memory, clock = InMemory(), itertools.count(100.0)
    answers = (None, None, Committed(COMMIT, carried=True), outcome, outcome)
    traced = TracedCollective(Scripted(*answers), memory.telemetry, "run-1", 0, lambda: next(clock))  # type: ignore[arg-type]
    traced.contribute(fragment(0))  # at 100
    traced.contribute(fragment(1))
    asked = [traced.outcome(step, block=block) for step, block in ((0, False), (0, True), (0, True), (1, True), (1, True))]
    assert asked == list(answers)
    (span,) = memory.spans("exchange")
    told = dict(span.attributes or {})
    assert (told["edit.outcome"], told["edit.fragments"], told["edit.payload_bytes"]) == (result, 2, 16)
    assert seconds(span) == (100.0, 108.0) and span.status.description == reason
    assert [seconds(wait) for wait in memory.spans("wait")] == [(103.0, 104.0), (105.0, 106.0), (107.0, 108.0)]
