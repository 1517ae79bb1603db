"""Modes `delayed` and `eager` when a round does not go as planned: late, lost, refused, in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from edit.codecs import decode
from edit.config.run import OuterConfig
from edit.records import Aborted, NeedsSnapshot, Verdict
from edit.worker.worker import EditWorker
from tests.support.models import regression_batches, small_mlp
from tests.support.scripted import ScriptedCollective, committed, random_steps, snapshot_of
from tests.support.scripted_peer import BOTH_OK, Peer, commit_next, flat, residuals, same
from tests.support.settings import worker_config

EVERY, DELAY = 4, 2
EAGER = {"mode": "eager", "outer": OuterConfig(optimizer="sgd", lr=0.5)}


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Makes entered peers that go on while a contribution is on its way."""
    peers: list[Peer] = []

    def make(**settings: Any) -> Peer:
        model = small_mlp()
        optimizer, collective = torch.optim.AdamW(model.parameters(), lr=1e-2), ScriptedCollective()
        known = {"every": EVERY, "codec": "fp32", "mode": "delayed", "delay": DELAY}
        worker = EditWorker(model, optimizer, collective, worker_config(**(known | settings)))
        worker.__enter__()
        peers.append(Peer(model, optimizer, collective, worker, regression_batches(0)))
        return peers[-1]

    yield make
    for made in peers:
        made.worker.__exit__(KeyboardInterrupt, None, None)


def plus(a: Any, b: Any) -> list[Tensor]:
    return [x + y for x, y in zip(a, b, strict=True)]


def minus(a: Any, b: Any) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def just_before(p: Peer) -> list[Tensor]:
    """One step, and the local parameters as they are after it but before the worker does anything."""
    seen: list[Tensor] = []
    handle = p.optimizer.register_step_post_hook(lambda *_: seen.extend(flat(p.model)))
    hooks = p.optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    p.step()
    handle.remove()
    return seen


def test_nothing_is_asked_or_applied_before_the_delay_is_over(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step(EVERY)
    after, asked = commit_next(p), len(p.collective.asked)
    p.forward()
    p.step(DELAY - 1)
    p.forward()
    assert p.worker.pending and p.worker.outer_step == 0 and len(p.collective.asked) == asked
    p.step()
    assert p.worker.outer_step == 1 and p.worker.digest == after.digest and p.collective.waited == 1


@pytest.mark.parametrize(
    ("mix", "left"), [("replay", EVERY), ("replace", EVERY - DELAY), ("lerp", EVERY)], ids=["replay", "replace", "lerp"]
)
def test_the_work_behind_the_next_contribution_is_what_is_left_in_it(peer: Callable[..., Peer], mix: str, left: int) -> None:
    p = peer(mix=mix)
    p.step(EVERY)
    commit_next(p)
    p.step(EVERY)
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [left] * 2


@pytest.mark.parametrize("mix", ["replay", "replace", "lerp"])
def test_in_doubt_it_asks_after_every_step_and_replays_whatever_the_mix(peer: Callable[..., Peer], mix: str) -> None:
    p = peer(mix=mix)
    p.step(EVERY)
    sent, theta = flat(p.model), p.theta
    p.collective.answers[0].append(None)
    p.step(DELAY)
    assert p.worker.pending and p.worker.outer_step == 0
    answer, after = committed(theta, random_steps(theta), BOTH_OK)
    p.collective.answers[0].append(answer)
    local = just_before(p)
    assert p.worker.outer_step == 1 and same(flat(p.model), plus(after.fragments, minus(local, sent)))


@pytest.mark.parametrize("verdict", [Verdict.ANOMALOUS, Verdict.IDLE, Verdict.NONFINITE, None])
@pytest.mark.parametrize("mode", ["delayed", "eager"])
def test_what_was_not_merged_follows_its_verdict(peer: Callable[..., Peer], verdict: Verdict | None, mode: str) -> None:
    p = peer(**(EAGER if mode == "eager" else {}), codec="int8")
    p.step(EVERY)
    theta = p.theta
    after = commit_next(p, [verdict, Verdict.OK])
    p.step(DELAY - 1)
    local = just_before(p)
    kept = after.fragments[0] + (local[0] - theta.fragments[0]) if verdict is None else after.fragments[0]
    torch.testing.assert_close(flat(p.model)[0], kept)
    assert not residuals(p)[0].any() and residuals(p)[1].any()


@pytest.mark.parametrize("mode", ["delayed", "eager"])
def test_what_is_dropped_with_a_refused_contribution_does_not_count_behind_the_next_one(
    peer: Callable[..., Peer], mode: str
) -> None:
    p = peer(**(EAGER if mode == "eager" else {}))
    p.step(EVERY)
    commit_next(p, [Verdict.NONFINITE, Verdict.IDLE])
    p.step(EVERY)
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [EVERY - DELAY] * 2


@pytest.mark.parametrize("mode", ["delayed", "eager"])
@pytest.mark.parametrize("delay", [EVERY - 1, EVERY])
def test_after_a_refused_contribution_that_leaves_next_to_nothing_half_of_h_follows(
    peer: Callable[..., Peer], mode: str, delay: int
) -> None:
    p = peer(**((EAGER if mode == "eager" else {}) | {"delay": delay}))
    p.step(EVERY)
    commit_next(p, [Verdict.NONFINITE, Verdict.IDLE])
    p.step(delay)
    assert p.worker.outer_step == 1 and not p.worker.pending
    p.step(EVERY // 2 - 1)
    assert not p.worker.pending
    p.step()
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [EVERY // 2] * 2


def test_a_blocking_peer_that_learns_late_that_its_contribution_was_refused_trains_before_the_next(
    peer: Callable[..., Peer],
) -> None:
    p = peer(mode="blocking")
    p.step(EVERY)
    p.collective.answers[0].append(None)
    p.forward()
    p.step(EVERY - 1)
    commit_next(p, [Verdict.NONFINITE, Verdict.IDLE])
    p.step()
    assert p.worker.outer_step == 1 and not p.worker.pending
    p.step(EVERY // 2)
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [EVERY // 2] * 2


def test_a_lost_round_leaves_a_delayed_peer_as_it_is_and_its_work_in_the_next(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step(EVERY)
    p.collective.answers[0].append(Aborted("too few"))
    p.step(DELAY - 1)
    local = just_before(p)
    assert same(flat(p.model), local) and not p.worker.pending
    p.step(EVERY - DELAY)
    assert [c.inner_steps for c in p.collective.rounds()[1]] == [2 * EVERY] * 2


def second_round(p: Peer, clip: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Merge a first round, then contribute a second: what is contributed, and the local parameters that it was taken from."""
    p.step(EVERY)
    commit_next(p, clip=clip)
    p.step(EVERY - 1)
    local = just_before(p)
    return [decode(c.payload) for c in p.collective.rounds()[1]], local


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_eager_jumps_to_its_estimate_and_sends_what_it_was(peer: Callable[..., Peer], clip: float) -> None:
    p = peer(**EAGER)
    start = p.theta
    deltas, local = second_round(p, clip)
    theta = p.theta
    assert same(deltas, minus(theta.fragments, local))
    first = [decode(c.payload) for c in p.collective.rounds()[0]]
    steps = minus(start.fragments, theta.fragments)
    change = [0.5 * 1.0 * clip * part for part in minus(deltas, first)]  # lr 0.5, and the script's weight 1
    for now, expected in zip(flat(p.model), minus(minus(theta.fragments, steps), change), strict=True):
        torch.testing.assert_close(now, expected)


def test_eager_expects_the_step_before_one_that_was_rolled_back(peer: Callable[..., Peer]) -> None:
    """Also where the verdict on this peer's contribution is good: a step that overflowed has no share of it."""
    p = peer(**EAGER)
    start = p.theta
    second_round(p)
    theta = p.theta
    answer, _ = committed(theta, [None, random_steps(theta)[1]], BOTH_OK)
    p.collective.answers[1].append(answer)
    p.step(EVERY)
    assert p.worker.outer_step == 2 and torch.equal(p.theta.fragments[0], theta.fragments[0])
    first, _, third = (decode(next(c.payload for c in those if c.fragment_id == 0)) for those in p.collective.rounds())
    expected = theta.fragments[0] - (start.fragments[0] - theta.fragments[0]) - 0.5 * (third - first)
    torch.testing.assert_close(flat(p.model)[0], expected)


def test_eager_takes_back_its_estimate_when_the_round_is_lost(peer: Callable[..., Peer]) -> None:
    p = peer(**EAGER)
    _, local = second_round(p)
    estimate = flat(p.model)
    p.collective.answers[1].append(Aborted("too few"))
    p.step(DELAY - 1)
    now = just_before(p)
    expected = plus(local, minus(now, estimate))
    for a, b in zip(flat(p.model), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_eager_keeps_what_it_sent_too_late(peer: Callable[..., Peer]) -> None:
    p = peer(**EAGER)
    _, local = second_round(p)
    estimate, theta = flat(p.model), p.theta
    after = commit_next(p, [None, None])
    p.step(DELAY - 1)
    now = just_before(p)
    assert p.worker.outer_step == 2 and p.worker.pending  # contributed again at once, and gone on from a new estimate
    sent = [decode(c.payload) for c in p.collective.rounds()[2]]
    progress = plus(minus(local, theta.fragments), minus(now, estimate))
    for a, b in zip(sent, progress, strict=True):
        torch.testing.assert_close(a, -b)
    assert p.worker.digest == after.digest


@pytest.mark.parametrize("settings", [{}, EAGER], ids=["delayed", "eager"])
def test_behind_keeps_only_what_was_done_after_sending(peer: Callable[..., Peer], settings: dict[str, Any]) -> None:
    p = peer(**settings)
    second_round(p)
    origin = flat(p.model)
    target = snapshot_of(9, [part + 0.25 for part in p.theta.fragments])
    p.collective.answers[1].append(NeedsSnapshot("too far"))
    p.collective.snapshots.append(target)
    p.step(DELAY - 1)
    now = just_before(p)
    assert p.worker.outer_step == 9 and same(flat(p.model), plus(target.fragments, minus(now, origin)))
    p.step(EVERY - DELAY)
    if settings:
        assert same([decode(c.payload) for c in p.collective.rounds()[2]], minus(target.fragments, flat(p.model))), (
            "after a snapshot there is no last step to estimate from"
        )


def test_leaving_waits_for_what_is_on_its_way(peer: Callable[..., Peer]) -> None:
    p = peer()
    p.step(EVERY + 1)
    after = commit_next(p)
    p.worker.__exit__(None, None, None)
    assert p.worker.outer_step == 1 and p.worker.digest == after.digest
    p.worker.__enter__()
