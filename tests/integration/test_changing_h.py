"""H that changes during a real run: the in-process run's bits over restarts, who was away, and who claims the H of before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from aggregator.control.status import run_status
from aggregator.run_feed import Advised, RoundReport, RunEvent
from aggregator.storage.state_folder import StateFolder
from edit import LocalRun, RunConfig
from edit.config.in_force import in_force
from edit.records import Contribution
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from tests.support.learner import Learner
from tests.support.running import Running, address, enter_together, running
from tests.support.served import new_folder

NAMES = ("a", "b")
TOML = """
name = "changing"
[model]
name = "entry:mine"
[sync]
every = 2
milestones = [[2, 8], [4, 3]]
outer_steps = 6
strict = true
[penalty]
enabled = false
weighting = "tokens2_per_step"
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
mean_steps = 1
correlation = 0.3
[codec]
up = "int8"
down = "bf16"
[rounds]
start_peers = {start}
quorum = {quorum}
[storage]
checkpoint_every = 3
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""
STEPS = 2 * 2 + 2 * 8 + 2 * 3
EVERY = [2, 2, 8, 8, 3, 3]


@dataclass
class Peer(Learner):
    """A learner that can be saved, and go on as another one."""

    taken: int = field(default=0)

    def step(self) -> None:
        self.taken += 1
        self.worker.count_tokens(5)
        super().step()

    def save(self) -> dict[str, Any]:
        now = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "worker": self.worker.state_dict()}
        return copy.deepcopy(now | {"draw": self.draw.get_state(), "taken": self.taken})

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.worker.load_state_dict(saved["worker"])
        self.draw.set_state(saved["draw"])
        self.taken = saved["taken"]


class Liar:
    """A carrier that says that each contribution has `claim` inner steps; 0: what is true."""

    def __init__(self, inner: HubCollective) -> None:
        self._inner, self.claim = inner, 0

    def contribute(self, contribution: Contribution) -> None:
        self._inner.contribute(replace(contribution, inner_steps=self.claim or contribution.inner_steps))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def serving(folder: StateFolder, events: list[RunEvent]) -> Iterator[tuple[Running, dict[str, HubCollective]]]:
    with running(folder) as here, IoThread() as io, ExitStack() as stack:
        here.tell(lambda run: run.feed.subscribe(lambda event, _: events.append(event)))
        collectives = {}
        for name in NAMES:
            channels = Channels([address(folder)], here.served.credentials(name))
            collectives[name] = HubCollective(io, channels, Identity(folder.run_id, "peer", name))
            stack.callback(collectives[name].close)
        yield here, collectives


def in_process(settings: RunConfig) -> str:
    run = LocalRun(settings, NAMES)
    with ExitStack() as stack:
        peers = [Peer(name, run.collective(name), settings) for name in NAMES]
        for peer in peers:
            stack.enter_context(peer.worker)
        for _ in range(STEPS):
            for peer in peers:
                peer.step()
        return run.state.digest


def rounds_of(events: list[RunEvent]) -> list[RoundReport]:
    return [event for event in events if isinstance(event, RoundReport) and event.committed]


@pytest.mark.parametrize("stopped_after", [4, 7, 20])
def test_a_run_that_is_stopped_around_a_change_has_the_same_bits(tmp_path: Path, stopped_after: int) -> None:
    folder, events = new_folder(tmp_path / "run", start=2, quorum=2, toml=TOML), list[RunEvent]()
    settings, saved = folder.config(), list[dict[str, Any]]()
    for last in (stopped_after, STEPS):
        with serving(folder, events) as (here, collectives), ExitStack() as stack:
            peers = [Peer(name, collectives[name], settings) for name in NAMES]
            for peer, of in zip(peers, saved, strict=False):
                peer.load(of)
            enter_together(stack, [peer.worker for peer in peers])
            for _ in range(peers[0].taken, last):
                for peer in peers:
                    peer.step()
            if last < STEPS:
                saved = [peer.save() for peer in peers]
                for peer in peers:
                    peer.worker.__exit__(KeyboardInterrupt, None, None)
                stack.pop_all()
                continue
            for peer in peers:
                peer.worker.synchronize()
            assert peers[0].worker.outer_step == 6
            assert {peer.worker.digest for peer in peers} == {in_process(settings)}
            status = run_status(here.run)
    reports = rounds_of(events)
    told = [report.outer_step for report in reports]  # one that was committed while the coordinator stopped may lack its report
    assert told in ([1, 2, 3, 4, 5, 6], [step for step in range(1, 7) if step != {4: 2, 7: 2, 20: 4}[stopped_after]])
    for report in reports:
        planned = in_force(settings, report.outer_step - 1)
        assert (report.every, report.outer_lr, report.outer_momentum) == (planned.every, planned.lr, planned.momentum)
        assert report.every == EVERY[report.outer_step - 1]
    assert (reports[0].outer_lr, reports[0].outer_momentum) == (1.0, 0.0)
    assert len({in_force(settings, step).lr for step in range(1, 6)}) == 3, "it follows H"
    assert [report.every for report in status.rounds] == [EVERY[report.outer_step - 1] for report in status.rounds]
    assert status.rounds and status.rounds[-1].outer_momentum == 0.6


def test_who_joins_after_a_change_takes_the_steps_in_force(tmp_path: Path) -> None:
    folder, events = new_folder(tmp_path / "run", toml=TOML), list[RunEvent]()
    settings = folder.config()
    with serving(folder, events) as (here, collectives), ExitStack() as stack:
        early, late = (Peer(name, collectives[name], settings) for name in NAMES)
        stack.enter_context(early.worker)
        for _ in range(2 * 2 + 2 * 8):
            early.step()
        here.await_(lambda run: run.rounds.machine.outer_step == 4)
        stack.enter_context(late.worker)
        here.await_(lambda run: "b" in run.rounds.machine.ready)
        for _ in range(3):
            early.step()
            late.step()
        late.worker.synchronize()
        assert late.worker.outer_step == 5 and late.worker.inner_steps == 3
        assert late.worker.last_commit is not None and late.worker.last_commit.has("b")


def test_who_claims_the_h_of_before_the_change_counts_for_twice_the_present_one(tmp_path: Path) -> None:
    folder, events = new_folder(tmp_path / "run", start=2, quorum=2, toml=TOML), list[RunEvent]()
    settings = folder.config()
    with serving(folder, events) as (_, collectives), ExitStack() as stack:
        lying = Liar(collectives["b"])
        peers = [Peer("a", collectives["a"], settings), Peer("b", lying, settings)]  # type: ignore[arg-type]
        enter_together(stack, [peer.worker for peer in peers])
        for step in range(2 * 2 + 2 * 8 + 3):
            lying.claim = 8 if step >= 2 * 2 + 2 * 8 else 0
            assert not [event for event in events if isinstance(event, Advised)], "what is true is believed"
            for peer in peers:
                peer.step()
        for peer in peers:
            peer.worker.synchronize()
        assert peers[0].worker.outer_step == 5
    advice = [event for event in events if isinstance(event, Advised)]
    assert [(one.peer_id, "says 8 inner steps" in one.advice, "they count as 6 and" in one.advice) for one in advice] == [
        ("b", True, True)
    ]
