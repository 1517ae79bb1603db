from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from edit.lab.compare.loop import Peer, step_together
from edit.local import LocalRun


class Run:
    """Rounds of all peers, each of whom contributes after `every` steps."""

    def __init__(self, names: list[str], every: int) -> None:
        self.names, self.every = names, every
        self.complete: tuple[str, ...] = ()
        self.commits = 0

    def stepped(self, name: str, steps: int) -> None:
        if steps % self.every == 0:
            self.complete = (*self.complete, name)
            if len(self.complete) == len(self.names):
                self.complete, self.commits = (), self.commits + 1


class Trainer:
    batch_factor = 1

    def __init__(self, name: str, run: Run, order: list[str]) -> None:
        self.name, self.run, self.order, self.steps = name, run, order, 0
        self.positions: list[int] = []

    def step(self, position: Callable[[], int] | None) -> None:
        assert self.name not in self.run.complete, "it would wait for a round that nobody closes"
        self.steps += 1
        self.order.append(self.name)
        if position is not None:
            self.positions.append(position())
        self.run.stepped(self.name, self.steps)

    def exchanged(self) -> bool:
        return False


class Worker:
    round_inner_steps = 1

    def __init__(self) -> None:
        self.tokens = 0

    def count_tokens(self, tokens: int) -> None:
        self.tokens += tokens


def peers_of(run: Run, speeds: list[float], order: list[str]) -> list[Peer]:
    made = zip(run.names, speeds, strict=True)
    return [Peer(name, cast(Any, Trainer(name, run, order)), cast(Any, Worker()), step_s) for name, step_s in made]


def test_equal_peers_take_turns() -> None:
    order: list[str] = []
    run = Run(["a", "b", "c"], every=2)
    step_together(peers_of(run, [1.0] * 3, order), lambda peer: peer.steps >= 4, run=cast(LocalRun, run))
    assert order == ["a", "b", "c"] * 4
    assert run.commits == 2


def test_a_fast_peer_waits_until_the_slow_one_has_contributed_and_goes_on_at_its_time() -> None:
    order: list[str] = []
    run = Run(["fast", "slow"], every=2)
    peers = peers_of(run, [1.0, 3.0], order)
    step_together(peers, lambda peer: peer.steps >= 4, run=cast(LocalRun, run))
    assert order == ["fast", "slow", "fast", "slow"] * 2
    assert [peer.now_s for peer in peers] == [12.0, 12.0]


def test_without_a_round_to_wait_for_a_fast_peer_takes_more_steps() -> None:
    order: list[str] = []
    run = Run(["fast", "slow"], every=1000)
    peers = peers_of(run, [1.0, 3.0], order)
    step_together(peers, lambda peer: peer.now_s >= 9.0, tokens=10, position=lambda peer: 100 + peer.steps)
    assert (order.count("fast"), order.count("slow")) == (9, 3)
    assert cast(Worker, peers[0].worker).tokens == 90
    assert cast(Trainer, peers[1].trainer).positions == [100, 101, 102]
