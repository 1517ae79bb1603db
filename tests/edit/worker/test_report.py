"""What a peer tells of itself: its progress at every step, its speed without waits, and what its loop says of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from edit.errors import ConfigError
from edit.records import Verdict
from edit.worker.speed import Speed, Stopwatch
from edit.worker.worker import EditWorker
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted import ScriptedCollective
from tests.support.scripted_peer import Peer, commit_next
from tests.support.settings import worker_config


class TestProgress:
    def test_it_is_told_on_entering_and_after_every_step(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=2)
        (entered,) = p.collective.told
        assert (entered.outer_step, entered.digest, entered.inner_steps) == (0, p.worker.digest, 0)
        p.step(2)
        one, two = p.collective.told[1:]
        assert (one.inner_steps, one.round_inner_steps, one.exchanging) == (1, 1, False)
        assert (two.inner_steps, two.round_inner_steps, two.exchanging) == (2, 0, True)
        after = commit_next(p)
        p.step()
        assert (p.collective.told[-1].outer_step, p.collective.told[-1].digest) == (1, after.digest)

    def test_a_loop_that_says_nothing_has_no_loss(self, peer: Callable[..., Peer]) -> None:
        p = peer()
        p.step()
        assert math.isnan(p.collective.told[-1].loss) and p.collective.told[-1].tokens_per_s == 0

    def test_the_loss_is_the_mean_of_the_last_finite_ones(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=100)
        for loss in (5.0, math.nan, 7.0):
            p.step()
            p.worker.report(loss=loss)
        p.step()
        assert p.collective.told[-1].loss == 6.0
        for _ in range(20):
            p.step()
            p.worker.report(loss=1.0)
        p.step()
        assert p.collective.told[-1].loss == 1.0

    def test_a_tensor_is_read_one_step_later(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=100)
        for loss in (5.0, 7.0):
            p.step()
            p.worker.report(loss=torch.tensor(loss, requires_grad=True))
        p.step()
        assert p.collective.told[-1].loss == 5.0

    def test_a_tensor_that_is_written_again_counts_as_it_was_reported(self, peer: Callable[..., Peer]) -> None:
        """As a CUDA graph does with its outputs, and a loop that adds up in place."""
        p, loss = peer(every=100), torch.tensor(5.0)
        p.worker.report(loss=loss, accuracy=loss)
        p.step()
        loss.fill_(7.0)
        p.worker.report(loss=loss)
        p.step()
        assert (p.collective.told[-1].loss, p.collective.told[-1].metrics) == (5.0, {"accuracy": 5.0})

    def test_a_loss_for_each_example_is_refused(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=100)
        with pytest.raises(ConfigError, match=r"^loss: must be one number, not 5; report its mean$"):
            p.worker.report(loss=torch.ones(5))
        p.worker.report(loss=torch.ones(1, 1))

    def test_tokens_count_for_the_weight_too(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=1)
        p.worker.report(tokens=30)
        p.step()
        assert {one.tokens for one in p.collective.contributed} == {30}

    def test_metrics_are_told_by_name_the_last_value_of_each(self, peer: Callable[..., Peer]) -> None:
        p = peer(every=100)
        p.worker.report(loss=1.0, accuracy=0.25, **{"eval/bleu": 12})
        p.step()
        assert p.collective.told[-1].metrics == {"accuracy": 0.25, "eval/bleu": 12.0}
        p.worker.report(accuracy=torch.tensor(0.5, requires_grad=True), broken=math.nan)
        p.step()
        assert p.collective.told[-1].metrics == {"accuracy": 0.25, "eval/bleu": 12.0}, "a tensor is read one step later"
        p.step()
        assert p.collective.told[-1].metrics == {"accuracy": 0.5, "eval/bleu": 12.0}

    @pytest.mark.parametrize(
        ("metrics", "message"),
        [
            ({"a\n": 1.0}, "must have 1 to 64 printable characters"),
            ({"": 1.0}, "must have 1 to 64 printable characters"),
            ({"a" * 65: 1.0}, "must have 1 to 64 printable characters"),
            ({f"m{number}": 1.0 for number in range(32)}, "33 metrics: must be at most 32"),
            ({"many": torch.zeros(2)}, "metric 'many': must be one number, not 2"),
        ],
    )
    def test_a_metric_that_cannot_be_sent_is_refused_at_once(
        self, peer: Callable[..., Peer], metrics: dict[str, float], message: str
    ) -> None:
        p = peer(every=100)
        p.worker.report(accuracy=0.5)
        with pytest.raises(ConfigError, match=message):
            p.worker.report(**metrics)
        p.step()
        assert p.collective.told[-1].metrics == {"accuracy": 0.5}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ScriptedCollective):
    """Each question takes a minute."""

    clock = Clock()

    def outcome(self, outer_step: int, *, block: bool):  # type: ignore[no-untyped-def]
        self.clock.now += 60.0
        return super().outcome(outer_step, block=block)


def test_waits_for_an_outcome_are_no_part_of_a_step() -> None:
    model, batches, collective = small_mlp(), regression_batches(0), Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with EditWorker(model, optimizer, collective, worker_config(every=1, codec="fp32"), clock=collective.clock) as worker:
        p = Peer(model, optimizer, collective, worker, batches)
        for _ in range(4):
            collective.clock.now += 2.0
            train_step(model, optimizer, next(batches))
            worker.report(tokens=100)
            commit_next(p)
        assert collective.clock.now > 200
        assert worker.speed.step_s == 2.0
        assert collective.told[-1].step_s == 2.0
        assert worker.wait_s >= 60.0 and worker.wait_s % 60 == 0, "without the two seconds of the step itself"
        assert worker.last_verdict is Verdict.OK
        assert 25 <= worker.speed.tokens_per_s <= 50


def test_a_lap_leaves_out_what_was_paused() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    assert watch.lap() is None
    clock.now = 3.0
    with pytest.raises(KeyboardInterrupt), watch.paused():
        clock.now = 10.0
        raise KeyboardInterrupt
    clock.now = 11.0
    assert watch.lap() == 4.0
    clock.now = 11.5
    assert watch.lap() == 0.5


def test_nothing_is_known_before_the_first_step() -> None:
    speed = Speed()
    assert math.isnan(speed.loss) and (speed.step_s, speed.tokens_per_s) == (0.0, 0.0)
    speed.add_step(None)
    assert speed.step_s == 0.0
