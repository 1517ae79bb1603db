"""What a peer decides, without a model and without a carrier: the actions that follow from each answer, in order."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import pytest

from edit.config.algorithm import SyncConfig
from edit.errors import ConfigError, EvictedError
from edit.records import Aborted, Evicted, Finished, NeedsSnapshot
from edit.worker.exchange import (
    WRONG_DIGEST,
    Action,
    Advanced,
    Answer,
    Apply,
    ApplyLazily,
    Ask,
    Contribute,
    Exchange,
    Failed,
    GiveUp,
    KeepLocal,
    Moved,
    ReadClock,
    SendAgain,
    Steps,
    TakeSnapshot,
)

_T = TypeVar("_T")


class Script:
    """Answers an exchange's questions in order (None once nothing is left) and notes its actions as text."""

    def __init__(self, max_staleness: int = 0, fragments: int = 2, alone: bool = True, **sync: Any) -> None:
        self.exchange = Exchange(SyncConfig(**({"every": 2} | sync)), max_staleness, fragments, alone=alone)
        self.answers: deque[Answer] = deque()
        self.failures: deque[Failed] = deque()
        self.snapshot = 7  # the outer step of the run's latest parameters
        self.now = 0.0
        self.log: list[str] = []

    def run(self, steps: Steps[_T], *answers: Answer) -> _T:
        self.answers.extend(answers)
        result: Any = None
        while True:
            try:
                result = self.carry_out(steps.send(result))
            except StopIteration as end:
                returned: _T = end.value
                return returned

    def carry_out(self, action: Action) -> Any:
        match action:
            case Ask(outer_step, block):
                self.log.append(f"{'wait' if block else 'ask'} {outer_step}")
                return self.answers.popleft() if self.answers else None
            case Apply(answer, pending, carried):
                whose = "carried" if carried else "theirs" if pending is None else "ours" if answer.merged else "late"
                self.log.append(f"apply {answer.outer_step} {whose}")
                return self.failures.popleft() if self.failures else Moved(answer.outer_step, answer.reason)
            case ApplyLazily(answer):
                self.log.append(f"lazily {answer.outer_step}")
            case TakeSnapshot(_, reason):
                self.log.append("snapshot")
                return self.failures.popleft() if self.failures else Moved(self.snapshot, reason)
            case Contribute(pending, send, again):
                self.log.append(f"contribute {pending.began}{'' if send else ' unsent'}{' again' if again else ''}")
            case SendAgain():
                self.log.append("send again")
            case GiveUp(_, aborted):
                self.log.append("give up" + " aborted" * aborted)
            case KeepLocal():
                self.log.append("keep")
            case ReadClock():
                return self.now
        return None

    def steps(self, count: int, *answers: Answer) -> list[str]:
        """Take so many optimizer steps and contribute if due; what the exchange did."""
        self.log.clear()
        self.answers.extend(answers)
        for _ in range(count):
            self.run(self.exchange.stepped())
            self.run(self.exchange.contribute_if_due())
        assert not self.answers
        return list(self.log)

    def take(self, *answers: Answer, lazily: bool = False) -> list[str]:
        self.log.clear()
        self.run(self.exchange.take(lazily=lazily), *answers)
        assert not self.answers
        return list(self.log)


def script(**settings: Any) -> Script:
    """An exchange that has just contributed to outer step 0."""
    made = Script(**settings)
    made.run(made.exchange.begin(0))
    assert made.steps(2) == ["ask 0", "contribute 0"]
    return made


def test_nothing_happens_before_a_contribution_is_due() -> None:
    made = Script()
    assert made.steps(1) == [] and made.exchange.pending is None


@pytest.mark.parametrize(
    ("answers", "log", "outer_step", "pending"),
    [
        ([Advanced(1, True)], ["wait 0", "apply 1 ours", "ask 1"], 1, False),
        ([Advanced(1, True), Advanced(2, False)], ["wait 0", "apply 1 ours", "ask 1", "apply 2 theirs", "ask 2"], 2, False),
        ([Advanced(1, False)], ["wait 0", "apply 1 late", "ask 1", "contribute 1", "keep"], 1, True),
        ([Aborted("lost")], ["wait 0", "give up aborted"], 0, False),
        ([NeedsSnapshot("behind")], ["wait 0", "snapshot", "give up"], 7, False),
        ([Finished(0)], ["wait 0", "give up"], 0, False),
        ([Finished(7)], ["wait 0", "snapshot", "give up"], 7, False),
        ([None], ["wait 0", "keep"], 0, True),
    ],
)
def test_what_follows_from_each_answer(answers: list[Answer], log: list[str], outer_step: int, pending: bool) -> None:
    made = script()
    assert made.take(*answers) == log
    assert made.exchange.outer_step == outer_step and (made.exchange.pending is not None) is pending
    assert made.exchange.finished is isinstance(answers[0], Finished)
    assert made.exchange.pending is None or made.exchange.pending.outcome_overdue


def test_evicted_is_an_error_and_nothing_stays_pending() -> None:
    made = script()
    with pytest.raises(EvictedError, match="enough"):
        made.take(Evicted("enough"))
    assert made.log == ["wait 0", "give up"] and made.exchange.pending is None


def test_an_overdue_outcome_is_asked_for_after_every_step_and_awaited_after_every_interval() -> None:
    made = script()
    made.take(None)
    assert made.take() == []  # no forward waits for it any more
    assert made.steps(3) == ["ask 0", "keep", "wait 0", "keep", "ask 0", "keep"]
    assert made.steps(1, Advanced(1, True)) == ["wait 0", "apply 1 ours", "ask 1", "ask 1", "contribute 1"]


@pytest.mark.parametrize("strict", [False, True])
def test_with_other_aggregators_beside_it_one_that_came_too_late_goes_with_the_next_ones(strict: bool) -> None:
    """Made again at once, its outcome would be waited for, with nothing given to the aggregators asked after this one: two
    peers, late at one aggregator each, would wait for each other."""
    made = script(alone=False, strict=strict)
    assert made.take(Advanced(1, False, False, "without us", 0)) == ["wait 0", "apply 1 late", "ask 1"]
    assert made.exchange.pending is None
    assert made.steps(2) == ["ask 1", "contribute 1"]
    assert made.exchange.pending is not None and made.exchange.pending.work.inner_steps == 4, "nothing of its work is lost"


def test_strict_waits_for_an_answer_and_sends_the_same_again() -> None:
    made = script(strict=True)
    assert made.take(Aborted("lost"), None, Advanced(1, True)) == [
        "wait 0", "send again", "wait 0", "wait 0", "apply 1 ours", "ask 1"
    ]  # fmt: skip


def test_where_training_overlaps_the_outcome_is_awaited_after_the_delay() -> None:
    made = Script(every=4, delay=2, mode="delayed")
    made.run(made.exchange.begin(0))
    assert made.steps(4) == ["ask 0", "contribute 0"]
    assert made.take() == [] and made.steps(1) == []
    assert made.steps(1, Advanced(1, True)) == ["wait 0", "apply 1 ours", "ask 1"]


def test_what_is_carried_stays_pending_and_the_next_outer_step_is_asked_about() -> None:
    made = script(max_staleness=4)
    pending = made.exchange.pending
    assert made.take(Advanced(1, False, carried=True)) == ["wait 0", "apply 1 carried", "ask 1", "keep"]
    assert made.exchange.pending is pending and made.exchange.outer_step == 1
    assert made.steps(1, Advanced(2, True)) == ["ask 1", "apply 2 ours", "ask 2"]


def test_work_names_an_outer_step_at_most_half_the_staleness_back() -> None:
    made = script(max_staleness=4)
    made.take(*(Advanced(step, False, carried=True) for step in range(1, 6)), Aborted("too stale"))
    assert made.steps(2) == ["ask 5", "contribute 3"]


def test_a_digest_that_is_wrong_with_a_carried_contribution_is_mended_by_a_snapshot() -> None:
    made = script(max_staleness=4)
    made.failures.append(Failed(WRONG_DIGEST, wrong_digest=True))
    assert made.take(Advanced(1, False, carried=True)) == ["wait 0", "apply 1 carried", "snapshot", "give up"]
    assert made.exchange.outer_step == 7 and made.exchange.last_reason == WRONG_DIGEST


@pytest.mark.parametrize("answer", [Advanced(1, True), NeedsSnapshot("behind")])
def test_what_cannot_be_fetched_changes_nothing(answer: Answer) -> None:
    made = script()
    made.failures.append(Failed("cut off"))
    assert made.take(answer)[-1] == "keep"
    assert made.exchange.outer_step == 0 and made.exchange.pending is not None and made.exchange.last_reason == "cut off"


def test_a_commit_applied_lazily_is_complete_when_its_last_fragment_is() -> None:
    made = script(mode="forward")
    answer = Advanced(1, True, reason="all are in")
    assert made.take(answer, lazily=True) == ["wait 0", "lazily 1"]
    assert made.take(lazily=True) == [] and made.exchange.outer_step == 0 and made.exchange.last_reason == "all are in"
    made.run(made.exchange.applied(answer))
    assert made.exchange.outer_step == 1 and made.exchange.pending is None


def test_after_a_restart_what_the_run_has_already_is_not_sent_again() -> None:
    made = Script()
    made.run(made.exchange.restore(None))
    assert made.log == ["ask 0"]
    assert made.steps(2, Advanced(1, True), Advanced(1, True)) == ["ask 0", "ask 0", "contribute 0 unsent"]
    assert made.take(Advanced(1, True)) == ["wait 0", "apply 1 ours", "ask 1"]
    assert made.steps(2) == ["ask 1", "ask 1", "contribute 1"] and not made.exchange.replaying_checkpoint


def test_a_restored_contribution_is_made_again() -> None:
    made = script()
    pending = made.exchange.pending
    again = Script()
    again.run(again.exchange.restore(pending))
    assert again.log == ["ask 0", "contribute 0 again"] and again.exchange.pending is pending


def test_leaving_waits_once_and_does_not_contribute_again() -> None:
    made = script()
    made.log.clear()
    made.run(made.exchange.leave(), Advanced(1, False))
    assert made.log == ["wait 0", "apply 1 late", "ask 1"] and made.exchange.pending is None


def test_a_schedule_by_time_reads_the_clock() -> None:
    made = Script(schedule="time", time_s=10.0)
    made.run(made.exchange.begin(0))
    made.now = 9.0
    assert made.steps(50) == []
    made.now = 10.0
    assert made.steps(1) == ["ask 0", "contribute 0"]


def test_more_groups_than_fragments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.groups = 4: the model has 2 fragments"):
        Script(every=4, groups=4)


def test_by_time_a_peer_that_is_cut_off_waits_once_per_interval() -> None:
    script = Script(schedule="time", time_s=4.0)
    script.run(script.exchange.begin(0))
    waited = []
    for now in range(1, 20):
        script.run(script.exchange.take())
        script.now = float(now)
        if "wait 0" in script.steps(1):
            waited.append(now)
    assert waited == [8, 12, 16]  # contributed at 4
