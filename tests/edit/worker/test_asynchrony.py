"""A worker whose contribution outlives its round, that contributes by the clock, or that is told how many steps to take."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch

from edit.codecs import decode
from edit.config.run import RunConfig
from edit.errors import ConfigError, LocalProtocolError, TransportError
from edit.fragments.digest import digest
from edit.local import LocalRun
from edit.records import Aborted, Committed, Progress, Verdict
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from tests.support.models import regression_batches, small_mlp, train_step
from tests.support.scripted import ScriptedCollective, committed, random_steps
from tests.support.scripted_peer import flat
from tests.support.settings import worker_config

OK = [Verdict.OK, Verdict.OK]
OTHERS: list[Verdict | None] = [None, None]


class Peer:
    """One worker, its scripted carrier and its clock."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1.7e9
        self.model = small_mlp(0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.collective = ScriptedCollective()
        self.config = worker_config(**({"every": 2, "codec": "fp32", "mode": "delayed", "max_staleness": 8} | settings))
        self.worker = EditWorker(self.model, self.optimizer, self.collective, self.config, clock=lambda: self.now)
        self.batches = regression_batches(0)
        self.worker.__enter__()
        assert self.collective.theta is not None
        self.theta = self.collective.theta

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        train_step(self.model, self.optimizer, next(self.batches))

    def commits(self, verdicts: list[Verdict | None], seed: int = 0, **fields: Any) -> list[torch.Tensor]:
        """The run advances by one; returns the steps."""
        steps = random_steps(self.theta, seed)
        outcome, after = committed(self.theta, list(steps), verdicts)
        self.collective.answers[self.theta.outer_step].append(dataclasses.replace(outcome, **fields))
        self.theta = after
        return steps


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_carried_stays_pending_while_theta_and_the_local_parameters_move() -> None:
    peer = Peer(delay=1)
    for _ in range(2):
        peer.step()
    sent = flat(peer.model)
    assert len(peer.collective.rounds()) == 1 and peer.worker.pending
    steps = peer.commits(OTHERS, carried=True)
    twin = small_mlp(0)
    twin.load_state_dict(peer.model.state_dict())
    optimizer, batches = torch.optim.SGD(twin.parameters(), lr=0.05), regression_batches(0)
    for _ in range(2):
        next(batches)
    train_step(twin, optimizer, next(batches))
    peer.step()
    assert peer.worker.pending and peer.worker.outer_step == 1 and peer.worker.digest == peer.theta.digest
    close(flat(peer.model), [local - step for local, step in zip(flat(twin), steps, strict=True)])
    assert len(peer.collective.rounds()) == 1, "it is not sent again"

    after_sending = [now - step for now, step in zip(sent, steps, strict=True)]
    progress = [local - origin for local, origin in zip(flat(peer.model), after_sending, strict=True)]
    peer.commits(OK, seed=1)
    assert peer.worker.synchronize() and not peer.worker.pending and peer.worker.outer_step == 2
    close(flat(peer.model), [theta + moved for theta, moved in zip(peer.theta.fragments, progress, strict=True)])


def test_a_carried_contributions_residual_advances_with_its_verdict_only() -> None:
    peer = Peer(codec="int8")
    for _ in range(2):
        peer.step()
    payloads = [contribution.payload for contribution in peer.collective.contributed]
    start = list(peer.theta.fragments)
    owed = [theta - local - decode(payload) for theta, local, payload in zip(start, flat(peer.model), payloads, strict=True)]
    peer.commits(OTHERS, carried=True)
    peer.step()
    assert "residual" not in peer.worker.state_dict()
    peer.commits(OK, seed=1)
    assert peer.worker.synchronize()
    residual = peer.worker.state_dict()["residual"]
    close([torch.cat([tensor.flatten() for tensor in residual.values()])], [torch.cat(owed)])


@pytest.mark.parametrize("mode", ["blocking", "forward", "delayed"])
def test_training_goes_on_while_a_contribution_is_carried(mode: str) -> None:
    peer = Peer(mode=mode, every=3)
    for _ in range(3):
        peer.step()
    for seed in range(2):
        peer.commits(OTHERS, seed, carried=True)
    peer.step()
    assert peer.worker.outer_step == 2 and peer.worker.pending, "both commits at once, and no waiting for the own one"
    assert peer.collective.waited == 1
    peer.commits(OK, seed=3)
    peer.step()
    assert not peer.worker.pending and peer.worker.outer_step == 3 and peer.worker.round_inner_steps == 2
    peer.step()
    assert [c.outer_step for c in peer.collective.contributed] == [0, 0, 3, 3]


def test_a_refused_contribution_goes_into_the_next_one() -> None:
    peer = Peer()
    for _ in range(2):
        peer.step()
    peer.commits(OTHERS, carried=True)
    peer.step()
    peer.collective.answers[1].append(Aborted("too stale"))
    local, theta = flat(peer.model), list(peer.theta.fragments)
    assert peer.worker.synchronize() and not peer.worker.pending and peer.worker.last_reason == "too stale"
    close(flat(peer.model), local)
    peer.step()
    again = peer.collective.rounds()[-1]
    assert len(peer.collective.rounds()) == 2 and again[0].inner_steps == 4
    close([decode(c.payload) for c in again], [outer - now for outer, now in zip(theta, flat(peer.model), strict=True)])


def test_without_carrying_a_late_contribution_is_sent_again_as_ever() -> None:
    peer = Peer()
    for _ in range(2):
        peer.step()
    peer.commits(OTHERS)
    peer.step()
    assert peer.worker.pending and [c.outer_step for c in peer.collective.contributed] == [0, 0, 0, 0], "named as it began"
    assert [c.inner_steps for c in peer.collective.contributed] == [2, 2, 3, 3]


def test_a_carried_commit_with_a_wrong_digest_is_healed_without_counting_twice() -> None:
    peer = Peer()
    for _ in range(2):
        peer.step()
    outcome, after = committed(peer.theta, list(random_steps(peer.theta)), OTHERS, digest_of="00")
    peer.collective.answers[0].append(dataclasses.replace(outcome, carried=True))
    peer.collective.snapshots.append(after)
    sent = flat(peer.model)
    peer.step()
    assert not peer.worker.pending and peer.worker.digest == digest(after.fragments)
    progress = [now - theta for now, theta in zip(flat(peer.model), after.fragments, strict=True)]
    assert all(
        float(moved.norm()) < float((was - theta).norm()) + 1.0
        for moved, was, theta in zip(progress, sent, after.fragments, strict=True)
    )
    assert len(peer.collective.rounds()) == 1


def test_a_contribution_names_where_its_work_began_at_most_half_of_what_is_allowed_ago() -> None:
    for allowed, named in ((8, 0), (4, 1), (2, 2), (1, 3)):
        peer = Peer(max_staleness=allowed)
        peer.step()
        for seed in range(3):
            peer.commits(OTHERS, seed)
        peer.step()
        assert peer.worker.outer_step == 3 and {c.outer_step for c in peer.collective.contributed} == {named}


def test_a_checkpoint_with_a_carried_contribution_finds_its_verdict() -> None:
    peer = Peer()
    for _ in range(2):
        peer.step()
    peer.commits(OTHERS, carried=True)
    peer.step()
    saved, model = peer.worker.state_dict(), peer.model.state_dict()
    old = peer.theta
    peer.commits(OTHERS, seed=4)
    peer.commits(OK, seed=5)

    for known in (True, False):
        again = small_mlp(3)
        again.load_state_dict(model)
        collective = ScriptedCollective(peer.theta if known else old)
        if known:
            for outer_step in (1, 2):
                answers = peer.collective.answers[outer_step]
                collective.answers[outer_step] = answers * 3
        worker = EditWorker(again, torch.optim.SGD(again.parameters(), lr=0.05), collective, peer.config)
        worker.load_state_dict(saved)
        worker.__enter__()
        assert worker.pending and worker.outer_step == (2 if known else 1)
        assert {c.outer_step for c in collective.contributed} == (set() if known else {0}), "sent again only if still open"
        if known:
            assert worker.synchronize() and not worker.pending and worker.digest == peer.theta.digest


# By the clock, and DyLU.


def test_by_the_clock_a_contribution_comes_with_the_first_step_after_the_deadline() -> None:
    peer = Peer(schedule="time", time_s=10.0, mode="blocking", max_staleness=0, every=1)
    for _ in range(3):
        peer.step(3.0)
    assert peer.collective.contributed == []
    peer.step(3.0)
    assert {c.inner_steps for c in peer.collective.contributed} == {4}
    peer.commits(OK)
    peer.now += 100.0  # the outcome takes long: the next deadline counts from its being applied
    for _ in range(3):  # it is applied 4 s into these 12 s
        peer.step(4.0)
    assert len(peer.collective.rounds()) == 1
    peer.step(4.0)
    assert [c.inner_steps for c in peer.collective.contributed] == [4, 4, 4, 4]


def test_a_clock_decides_nothing_where_the_schedule_is_by_steps() -> None:
    sent = []
    for clock in (lambda: 0.0, iter(range(10**9, 0, -(10**6))).__next__):
        model, collective = small_mlp(0), ScriptedCollective()
        optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.05), regression_batches(0)
        with EditWorker(model, optimizer, collective, worker_config(every=5), clock=clock) as worker:
            for _ in range(5):
                train_step(model, optimizer, next(batches))
            assert worker.pending
            collective.answers[0].append(Aborted("for the test"))
        sent.append([(one.inner_steps, bytes(one.payload.data)) for one in collective.contributed])
    assert len(sent[0]) == 2 and sent[0] == sent[1]


def test_the_run_says_how_many_steps_to_take_and_a_peer_adopts_it_with_the_commit() -> None:
    peer = Peer(mode="blocking", max_staleness=0)
    for _ in range(2):
        peer.step()
    peer.commits(OK, inner_steps=1)
    peer.step()
    assert [c.inner_steps for c in peer.collective.contributed] == [2, 2, 1, 1]
    peer.commits(OK, inner_steps=3)
    for _ in range(2):
        peer.step()
    assert len(peer.collective.rounds()) == 2
    peer.step()
    assert [c.inner_steps for c in peer.collective.contributed][-1] == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "clock"}, "sync.schedule = 'clock'"),
        ({"time_s": 0.0}, "sync.time_s = 0.0"),
        ({"time_s": float("nan")}, "sync.time_s = nan"),
        ({"max_staleness": -1}, "rounds.max_staleness = -1"),
        ({"max_staleness": 1, "groups": 2, "every": 4}, "sync.groups = 2: must be 1"),
        ({"strict": True, "schedule": "time"}, "sync.strict = True: cannot be kept"),
        ({"strict": True, "max_staleness": 1}, "sync.strict = True: cannot be kept"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        worker_config(**settings)


def test_a_commit_of_the_script_is_carried_only_if_it_says_so() -> None:
    peer = Peer()
    peer.commits(OTHERS)
    assert isinstance(outcome := peer.collective.outcome(0, block=False), Committed) and not outcome.carried


def test_where_work_began_is_kept_over_an_exact_resume() -> None:
    """Or work that was given up, and goes into the next contribution, would count as less stale than it is."""

    def named(resumed: bool) -> tuple[int, int]:
        peer = Peer(mode="delayed", max_staleness=8, every=4, delay=1)
        for _ in range(4):
            peer.step()
        for seed in range(2):
            peer.commits(OTHERS, seed, carried=True)
        peer.step()
        peer.collective.answers[2].append(Aborted("too stale"))
        peer.step()
        assert not peer.worker.pending and peer.worker.outer_step == 2
        if resumed:
            peer.collective.theta = peer.theta
            saved = copy.deepcopy((peer.model.state_dict(), peer.worker.state_dict()))
            peer.worker.__exit__(KeyboardInterrupt, None, None)
            peer.optimizer = torch.optim.SGD(peer.model.parameters(), lr=0.05)
            peer.worker = EditWorker(peer.model, peer.optimizer, peer.collective, peer.config, clock=lambda: 1.7e9)
            peer.model.load_state_dict(saved[0])
            peer.worker.load_state_dict(saved[1])
            peer.worker.__enter__()
        for _ in range(2):
            peer.step()
        last = peer.collective.rounds()[-1][0]
        return last.outer_step, last.inner_steps

    assert named(resumed=True) == named(resumed=False) == (0, 8)


class CutOffOnce(ScriptedCollective):
    """The first report fails: then the state that was loaded has moved the model."""

    fails = True

    def report(self, progress: Progress) -> None:
        if self.fails:
            self.fails = False
            raise TransportError("cut off")
        super().report(progress)


def test_entering_that_failed_after_the_model_was_moved_needs_the_state_once_more() -> None:
    peer = Peer()
    for _ in range(2):
        peer.step()
    peer.commits(OTHERS, carried=True)
    peer.step()
    saved, model = copy.deepcopy(peer.worker.state_dict()), copy.deepcopy(peer.model.state_dict())
    peer.commits(OTHERS, seed=4)
    ends = []
    for fails in (False, True):
        again = small_mlp(3)
        again.load_state_dict(model)
        collective = CutOffOnce(peer.theta)
        collective.fails = fails
        collective.answers[1] = peer.collective.answers[1] * 9
        worker = EditWorker(again, torch.optim.SGD(again.parameters(), lr=0.05), collective, peer.config)
        worker.load_state_dict(copy.deepcopy(saved))
        if fails:
            with pytest.raises(TransportError, match="cut off"):
                worker.__enter__()
            with pytest.raises(
                LocalProtocolError, match="load the state of the model, of the optimizer and of the worker once"
            ):
                worker.__enter__()
            again.load_state_dict(model)
            worker.load_state_dict(copy.deepcopy(saved))
        with contextlib.suppress(KeyboardInterrupt), worker:
            assert worker.outer_step == 2 and worker.pending
            ends.append(flat(again))
            raise KeyboardInterrupt
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("mode", ["blocking", "delayed", "eager"])
def test_interrupted_while_an_outer_step_is_applied_it_neither_saves_nor_goes_on(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunConfig.from_mapping({"sync": {"every": 2, "outer_steps": 9, "mode": mode}, "codec": {"up": "int8"}})
    run, model = LocalRun(settings, ["a"]), small_mlp(0)
    optimizer, batches, applied = torch.optim.SGD(model.parameters(), lr=0.05), regression_batches(0), []
    plain = Replica.apply_fragment

    def apply(self: Replica, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        applied.append(args[0])
        if len(applied) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Replica, "apply_fragment", apply)
    said = "interrupted while an outer step was being applied"
    with (
        pytest.raises(LocalProtocolError, match=said),
        EditWorker(model, optimizer, run.collective("a"), WorkerConfig.of(settings)) as it,
    ):
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                train_step(model, optimizer, next(batches))
        assert len(it.shares) == 1 and len(applied) == 1
        for go_on in (it.state_dict, it.synchronize, lambda: train_step(model, optimizer, next(batches))):
            with pytest.raises(LocalProtocolError, match=said):
                go_on()
    assert len(applied) == 1
