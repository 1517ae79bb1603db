"""Peers of different speed in one run, over real gRPC with a real coordinator and in process: the same answers, to the bit.

The test's thread interleaves the peers step by step; the coordinator's clock, where it matters, is the test's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aggregator.resources import Clock
from edit import Collective, EditWorker, LocalRun, RunConfig, WorkerConfig
from edit.fragments.schema import Schema
from edit.records import Commit, Contribution, Lacks, Outcome, PeerVerdict, Progress, Snapshot, Verdict
from edit.rounds.events import Tick
from editpb.identity import Identity
from editpb.messages import RunPhase, View
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from tests.support.running import address, enter_together, running
from tests.support.served import new_folder

NAMES = ("a", "b")
ROWS = 4  # of a batch
TOML = """
name = "asynchrony"
[model]
name = "entry:mine"
[sync]
every = 2
{sync}
[penalty]
enabled = false
weighting = "tokens"
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.5
[codec]
up = "int8"
down = "bf16"
[rounds]
{rounds}
[membership]
heartbeat_s = 0.2
lease_s = 100000.0
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""
ARRIVALS = 'merging = "arrivals"\nmax_staleness = 12'
CARRYING = "quorum = 1\nfloor_s = 5.0\nceiling_s = 10.0\ngrace_s = 1.0\nmax_staleness = 1"
TOGETHER = "start_peers = 2\nquorum = 2\nfloor_s = 5.0\nceiling_s = 10.0"


@dataclass
class SlowLink:
    """A collective whose last fragment stays on its way while `held`; a contribution that has an outcome is dropped."""

    inner: Collective
    commits: list[Commit] = field(default_factory=list)
    held: bool = False
    waiting: list[Contribution] = field(default_factory=list)

    @property
    def peer_id(self) -> str:
        return self.inner.peer_id

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[object] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        self.last = len(schema.fragments) - 1
        return self.inner.join(schema, found, None, lacks)

    def contribute(self, contribution: Contribution) -> None:
        if self.held and contribution.fragment_id == self.last:
            self.waiting.append(contribution)
        else:
            self.inner.contribute(contribution)

    def report(self, progress: Progress) -> None:
        self.inner.report(progress)

    def release(self) -> None:
        """The rest arrives."""
        self.held = False
        while self.waiting:
            self.inner.contribute(self.waiting.pop())

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        outcome = self.inner.outcome(outer_step, block=block)
        if (commit := getattr(outcome, "commit", None)) is not None:
            self.commits.append(commit)
        return outcome

    def snapshot(self) -> Snapshot:
        return self.inner.snapshot()


class Peer:
    """A plain loop, one step at a time. now: of its clock."""

    def __init__(self, name: str, collective: Collective, config: WorkerConfig) -> None:
        self.name, self.now = name, 0.0
        self.link = SlowLink(collective)
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.05)
        self.worker = EditWorker(self.network, self.optimizer, self.link, config, clock=lambda: self.now)
        self.data = torch.Generator().manual_seed(ord(name))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            inputs, targets = (torch.randn(ROWS, width, generator=self.data) for width in (6, 3))
            nn.functional.mse_loss(self.network(inputs), targets).backward()
            self.worker.count_tokens(ROWS)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def verdicts(self) -> list[tuple[int, PeerVerdict]]:
        """On this peer's first fragment: the outer steps that have its contribution."""
        found = ((commit.outer_step, commit.fragments[0].verdict_of(self.name)) for commit in self.link.commits)
        return [(step, verdict) for step, verdict in found if verdict is not None]

    def result(self) -> tuple[object, ...]:
        """All that two carriers must agree on."""
        weights = [(step, verdict.verdict, verdict.weight, verdict.staleness) for step, verdict in self.verdicts()]
        local = [parameter.detach().clone() for parameter in self.network.parameters()]
        return self.worker.outer_step, self.worker.digest, weights, local


@dataclass
class Site:
    """Two peers in one run. hear, over: every peer is told of the newest commit, or that the run is finished; expire: the open
    round reaches its deadline with only this peer in; drain: the operator's word; damage: bytes of this peer to the open round
    are bad; later: so many seconds pass, and every peer is told of the round that is open then."""

    peers: dict[str, Peer]
    hear: Callable[[], None]
    over: Callable[[], None]
    expire: Callable[[str], None]
    drain: Callable[[], None]
    damage: Callable[[str], None]
    later: Callable[[float], None]

    def catch_up(self) -> None:
        """Every contribution that is not held has its outcome, and every peer all commits."""
        for peer in self.peers.values():
            if peer.worker.pending and not peer.link.held:
                peer.worker.synchronize()
        self.hear()
        newest = max(peer.worker.outer_step for peer in self.peers.values())
        for peer in self.peers.values():
            if peer.worker.outer_step < newest:
                peer.worker.synchronize()


@contextmanager
def entered(collectives: dict[str, Collective], config: RunConfig) -> Iterator[dict[str, Peer]]:
    with ExitStack() as stack:
        peers = {name: Peer(name, collective, WorkerConfig.of(config)) for name, collective in collectives.items()}
        if config.rounds.start_peers > 1:
            enter_together(stack, [peer.worker for peer in peers.values()])
        else:
            for peer in peers.values():
                stack.enter_context(peer.worker)
        yield peers


@contextmanager
def over_grpc(folder: Path, toml: str) -> Iterator[Site]:
    state, now = new_folder(folder / "run", toml=toml), [0.0]
    with running(state, Clock(monotonic=lambda: now[0])) as here, IoThread() as io, ExitStack() as stack:
        carriers: dict[str, HubCollective] = {}
        for name in NAMES:
            channels = Channels([address(state)], here.served.credentials(name))
            carriers[name] = HubCollective(io, channels, Identity(state.run_id, "peer", name))
            stack.callback(carriers[name].close)

        def told(what: Callable[[View], bool]) -> None:
            def look() -> bool | None:
                views = [carrier._session.view for carrier in carriers.values()]
                return all(view is not None and what(view) for view in views) or None

            assert io.wait(look, timeout=30), "a peer was never told"

        def hear() -> None:
            newest = here.run.rounds.published.outer_step
            told(lambda view: view.outer_step >= newest)

        def over() -> None:
            told(lambda view: view.phase is RunPhase.FINISHED)

        def expire(name: str) -> None:
            here.await_(lambda run: run.founded and run.rounds.machine.arrived == {name})
            now[0] += 100.0

        def drain() -> None:
            here.tell(lambda run: run.drain())

        def damage(name: str) -> None:
            here.await_(lambda run: run.founded and run.rounds.machine.round_id)
            here.tell(lambda run: run.rounds.fault(name, run.rounds.machine.round_id, "a damaged chunk"))

        def later(seconds: float) -> None:
            now[0] += seconds
            here.tell(lambda run: run.rounds.feed(Tick()))
            told(lambda view: view.round_id == here.run.rounds.machine.round_id)

        with entered(dict(carriers), RunConfig.from_toml(state.run_toml)) as peers:
            yield Site(peers, hear, over, expire, drain, damage, later)


@contextmanager
def in_process(folder: Path, toml: str) -> Iterator[Site]:
    run_toml = folder / "local.toml"
    run_toml.write_text(toml)
    config = RunConfig.from_toml(run_toml)
    run = LocalRun(config, NAMES)
    with entered({name: run.collective(name) for name in NAMES}, config) as peers:

        def unknown(*_: object) -> None:
            pytest.fail("a LocalRun has no operator, no bytes and no clock")

        yield Site(peers, lambda: None, lambda: None, lambda _: run.close("deadline"), unknown, unknown, unknown)


def both_ways(folder: Path, toml: str, play: Callable[[Site], None]) -> list[list[tuple[object, ...]]]:
    """What `play` leaves behind, by peer: over gRPC, and in process."""
    results = []
    for carrier in (over_grpc, in_process):
        with carrier(folder, toml) as site:
            play(site)
            results.append([peer.result() for peer in site.peers.values()])
    return results


def assert_same(results: list[list[tuple[object, ...]]]) -> None:
    carried, local = results
    for one, other in zip(carried, local, strict=True):
        assert one[:3] == other[:3]
        assert all(torch.equal(x, y) for x, y in zip(one[3], other[3], strict=True))  # type: ignore[call-overload]


def toml_of(rounds: str, sync: str = "outer_steps = 100") -> str:
    return TOML.format(rounds=rounds, sync=sync)


def test_by_arrival_a_peer_that_is_four_times_slower_contributes_stale_work_and_both_agree(tmp_path: Path) -> None:
    def play(site: Site) -> None:
        fast, slow = site.peers.values()
        for _ in range(4):
            for _ in range(4):
                fast.step()
                site.catch_up()
            slow.step()
            site.catch_up()
        assert [verdict.staleness for _, verdict in slow.verdicts()] == [4, 4]
        assert [verdict.staleness for _, verdict in fast.verdicts()] == [0, 0, 0, 0, 1, 0, 0, 0]
        assert {verdict.verdict for peer in (fast, slow) for _, verdict in peer.verdicts()} == {Verdict.OK}
        assert fast.worker.outer_step == slow.worker.outer_step == 10
        assert fast.worker.digest == slow.worker.digest

    assert_same(both_ways(tmp_path, toml_of(ARRIVALS), play))


def test_by_arrival_a_contribution_on_a_slow_link_stays_on_its_way_while_its_peer_trains_on(tmp_path: Path) -> None:
    def play(site: Site) -> None:
        fast, slow = site.peers.values()
        slow.link.held = True
        slow.step(2)
        for _ in range(3):
            fast.step(2)
            site.catch_up()
        slow.step()
        assert slow.worker.pending and slow.worker.outer_step == 3
        assert slow.worker.digest == fast.worker.digest
        slow.link.release()
        site.catch_up()
        assert [(step, verdict.staleness) for step, verdict in slow.verdicts()] == [(4, 3)]
        slow.step()
        site.catch_up()
        assert not slow.worker.pending and slow.worker.digest == fast.worker.digest
        slow.step()
        site.catch_up()
        assert slow.verdicts()[-1][0] == 5

    assert_same(both_ways(tmp_path, toml_of(ARRIVALS), play))


def test_in_rounds_a_late_contribution_is_carried_and_weighed_by_its_staleness(tmp_path: Path) -> None:
    def play(site: Site) -> None:
        a, b = site.peers.values()
        b.link.held = True
        a.step(2)
        b.step(2)
        site.expire("a")
        site.catch_up()
        assert b.worker.pending and not b.verdicts() and a.worker.outer_step == b.worker.outer_step == 1
        b.link.release()
        a.step(2)
        site.catch_up()
        for peer in (a, b):
            peer.step(2)
        site.catch_up()
        assert [(step, verdict.staleness) for step, verdict in a.verdicts()] == [(1, 0), (2, 0), (3, 0)]
        assert [(step, verdict.staleness) for step, verdict in b.verdicts()] == [(2, 1), (3, 0)]
        late = 2**-0.5 / (1 + 2**-0.5)
        assert [verdict.weight for _, verdict in b.verdicts()] == pytest.approx([late, 0.5])
        assert a.worker.digest == b.worker.digest

    assert_same(both_ways(tmp_path, toml_of(CARRYING), play))


def test_in_rounds_what_is_too_stale_is_refused_and_its_work_counts_in_the_next_contribution(tmp_path: Path) -> None:
    def play(site: Site) -> None:
        a, b = site.peers.values()
        b.link.held = True
        for steps in (2, 1):
            a.step(2)
            b.step(steps)
            site.expire("a")
            if steps == 2:
                site.catch_up()
        b.link.held, b.link.waiting = False, []
        a.worker.synchronize()
        site.hear()
        b.worker.synchronize()  # refused: it contributes all its work at once
        assert b.worker.outer_step == 2 and not b.verdicts()
        a.step(2)
        site.catch_up()
        assert [(step, verdict.staleness) for step, verdict in b.verdicts()] == [(3, 0)]
        assert b.verdicts()[0][1].weight == pytest.approx(3 / 5)  # three steps' tokens beside two
        assert a.worker.digest == b.worker.digest

    assert_same(both_ways(tmp_path, toml_of(CARRYING), play))


def test_by_time_a_slow_peer_contributes_fewer_steps_and_nobody_waits(tmp_path: Path) -> None:
    """One second a step, or four; eight seconds a round, counted from when its update is applied."""

    def play(site: Site) -> None:
        a, b = site.peers.values()
        for now in range(1, 25):
            for peer, seconds in ((a, 1), (b, 4)):
                peer.now = now
                if now % seconds == 0:
                    peer.step()
            if now % 8 == 0:
                site.catch_up()
        assert a.worker.outer_step == b.worker.outer_step == 3 and a.worker.digest == b.worker.digest
        assert [(step, verdict.staleness) for step, verdict in b.verdicts()] == [(1, 0), (2, 0), (3, 0)]
        assert [verdict.weight for _, verdict in b.verdicts()] == pytest.approx([0.2, 0.2, 0.2])

    assert_same(both_ways(tmp_path, toml_of(TOGETHER, 'outer_steps = 100\nschedule = "time"\ntime_s = 8.0'), play))


def test_a_drain_ends_every_peer_at_the_same_outer_step_whatever_is_on_its_way(tmp_path: Path) -> None:
    with over_grpc(tmp_path, toml_of(ARRIVALS)) as site:
        a, b = site.peers.values()
        b.link.held = True
        b.step(2)
        a.step(2)
        site.catch_up()
        assert b.worker.pending
        a.step(1)
        site.drain()
        site.over()
        for peer in (a, b):
            peer.worker.synchronize()
            assert peer.worker.finished and not peer.worker.pending
        a.step(3)  # nothing comes of these
        assert a.worker.outer_step == b.worker.outer_step == 1
        assert a.worker.digest == b.worker.digest


def test_a_run_that_stops_at_so_many_tokens_ends_everybody_at_the_same_outer_step(tmp_path: Path) -> None:
    def play(site: Site) -> None:
        a, b = site.peers.values()
        for _ in range(3):
            a.step(2)
            site.catch_up()
        site.over()
        for peer in (a, b):
            peer.worker.synchronize()
            assert peer.worker.finished and peer.worker.outer_step == 3

    assert_same(both_ways(tmp_path, toml_of(ARRIVALS, f"outer_steps = 100\ntokens = {2 * 2 * ROWS + 1}"), play))


def test_a_peer_that_was_quarantined_follows_the_run_and_contributes_again_afterwards(tmp_path: Path) -> None:
    with over_grpc(tmp_path, toml_of("quorum = 1\nfloor_s = 5.0\nceiling_s = 10.0\ngrace_s = 0.0")) as site:
        a, b = site.peers.values()
        for _ in range(3):
            site.damage("b")
            a.step(2)
            site.catch_up()
        b.step(2)
        for _ in range(2):
            a.step(2)
            site.catch_up()
        assert a.worker.outer_step == 5 and not b.verdicts(), "nothing is taken of it"
        assert a.worker.digest == b.worker.digest
        site.later(61.0)
        for _ in range(3):
            a.step(2)
            b.step(2)
            site.catch_up()
        assert [verdict.verdict for _, verdict in b.verdicts()][-1:] == [Verdict.OK]
        assert a.worker.digest == b.worker.digest
