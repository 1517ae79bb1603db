"""Training goes on from host to host: whenever the owner of a part ends, what was contributed becomes the same outer step."""

from __future__ import annotations

import copy
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edit import LocalRun
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError
from edit.fragments.digest import digest
from edit.fragments.shards import Shard
from edit.records import Committed, Contribution
from edit.replica.ranks import ALONE, Ranks
from edit.replica.replica import Replica
from edit.worker.config import WorkerConfig
from edit.worker.worker import EditWorker
from editpb.identity import Identity
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm.connect import connect_swarm
from tests.support.council.trained import POINTS, Trained, trained
from tests.support.encoded import encode
from tests.support.exhaustive import rarely
from tests.support.fake_run import vectors
from tests.support.served import TOML
from tests.support.thread_ranks import at_every_rank
from tests.support.two_ranks import SCHEMA, SIZES, shards

TRAINS_S = 60.0
MODES = {
    "blocking": "",
    "forward": 'mode = "forward"',
    "delayed": 'mode = "delayed"\ndelay = 2',
    "streaming": "groups = 2",
    "streaming, delayed": 'groups = 2\nmode = "delayed"',
    "eager": 'mode = "eager"\ndelay = 3',
    "strict": "strict = true",
    "staleness": "",
}


def settings(mode: str) -> str:
    toml = TOML.replace("every = 2", f"every = 4\n{MODES[mode]}").replace("lr = 1.0", "lr = 0.7")
    toml += "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    return toml.replace("[rounds]", "[rounds]\nmax_staleness = 2") if mode == "staleness" else toml


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


class Peer:
    """Takes inner steps, and notes theta's digest after each outer step and how many inner steps there were until then."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, worker: EditWorker) -> None:
        self.model, self.optimizer, self.worker = model, optimizer, worker
        self.steps, self.seen = 0, dict[int, str]()
        self._random = torch.Generator().manual_seed(3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3, generator=self._random)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1
        self.seen.setdefault(self.worker.outer_step, self.worker.digest)

    def train(self, until: int) -> None:
        begun = time.monotonic()
        while self.worker.outer_step < until:
            assert time.monotonic() - begun < TRAINS_S, (self.worker.outer_step, self.worker.last_reason)
            self.step()


def undisturbed(model: nn.Module, config: RunConfig, until: int) -> Peer:
    """The same peer in a run of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with EditWorker(model, optimizer, LocalRun(config, ["peer"]).collective("peer"), WorkerConfig.of(config)) as worker:
        peer = Peer(model, optimizer, worker)
        peer.train(until)
        return peer


def fault(at: Trained, peer: Peer, point: str) -> None:
    at.whole()
    reached = peer.worker.outer_step
    if point == POINTS[0]:
        at.end_owner()
    else:
        at.point = point
    peer.train(reached + 2)
    assert not at.point


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", rarely(MODES, kept=("streaming, delayed", "eager", "staleness")))
def test_one_peer_comes_to_the_bits_of_a_hub_wherever_the_owner_ends(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml, model = settings(mode), new_model()
    config = RunConfig.from_mapping(tomllib.loads(toml.format(start=1, quorum=1)))
    hub = undisturbed(copy.deepcopy(model), config, 2 * len(POINTS) + 1)
    replica = Replica(model)
    with trained(tmp_path, monkeypatch, replica.schema, [each.clone() for each in replica.founding()], toml) as at:
        identity = Identity(at.swarm.run_id, "peer", "peer")
        with IoThread() as io, connect_swarm(io, at.addresses(), 1, at.credentials(), identity) as (connection, config, _):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with EditWorker(model, optimizer, connection, WorkerConfig.of(config)) as worker:
                peer = Peer(model, optimizer, worker)
                for point in POINTS:
                    fault(at, peer, point)
                peer.train(2 * len(POINTS) + 1)
    assert len(at.ended) == len(POINTS)
    assert (peer.steps, peer.seen) == (hub.steps, hub.seen)


def test_a_peer_ends_where_its_site_no_longer_allows_the_run_when_it_connects_to_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def check(text: str, config: RunConfig) -> None:
        if over.is_set():
            raise ConfigError("limits.until: that is over")

    model = new_model()
    replica = Replica(model)
    toml = settings("blocking")
    with trained(tmp_path, monkeypatch, replica.schema, [each.clone() for each in replica.founding()], toml) as at:
        identity, site = Identity(at.swarm.run_id, "peer", "peer"), Site(check=check)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            IoThread() as io,
            connect_swarm(io, at.addresses(), 1, at.credentials(), identity, site=site) as (connection, config, _),
            pytest.raises(RefusedError, match=r"limits\.until: that is over"),
            EditWorker(model, optimizer, connection, WorkerConfig.of(config)) as worker,
        ):
            peer = Peer(model, optimizer, worker)
            peer.train(1)
            at.whole()
            over.set()
            at.end_owner()
            peer.train(3)


class Sharded:
    """One rank of a peer without a model: it contributes shards of vectors, step by step with the other peers and ranks."""

    def __init__(self, at: Trained, name: str, gate: threading.Barrier) -> None:
        self.at, self.name, self.gate, self.credentials = at, name, gate, at.credentials(name)
        self.key = at.swarm.own(name)[0]

    def train(self, ranks: Ranks, held: Sequence[Shard], points: Sequence[str]) -> list[str]:
        """Take an outer step for each point at which the owner ends; return the digests that they led to."""
        identity, site = Identity(self.at.swarm.run_id, "peer", self.name), Site(key=self.key)
        with (
            IoThread() as io,
            connect_swarm(io, self.at.addresses(), 1, self.credentials, identity, ranks, site=site) as (connection, _, _),
        ):
            (collective,) = connection.shares
            collective.join(SCHEMA, list, held)
            digests = []
            for outer_step, point in enumerate(points):
                self._fault(ranks, point)
                assert collective.outcome(outer_step, block=False) is None
                self._contribute(collective.contribute, held, outer_step)
                while (outcome := collective.outcome(outer_step, block=True)) is None:
                    pass
                assert isinstance(outcome, Committed), outcome
                assert outcome.commit.has(self.name)
                digests.append(outcome.commit.digest)
                self.gate.wait()
            return digests

    def _fault(self, ranks: Ranks, point: str) -> None:
        self.gate.wait()
        if ranks.leads and self.name == "two":
            self.at.whole()
            if point == POINTS[0]:
                self.at.end_owner()
            else:
                self.at.point = point
        self.gate.wait()

    def _contribute(self, contribute: Callable[[Contribution], None], held: Sequence[Shard], outer_step: int) -> None:
        for i, (shard, delta) in enumerate(zip(held, deltas(self.name, outer_step), strict=True)):
            if shard.numel:
                payload, boxes = encode("fp32", shard.take(delta)), None if shard.is_whole else shard.boxes
                contribute(
                    Contribution(outer_step=outer_step, fragment_id=i, inner_steps=5, tokens=50, payload=payload, boxes=boxes)
                )


def deltas(name: str, outer_step: int) -> list[Tensor]:
    return vectors(SIZES, 10 * outer_step + len(name))


@pytest.mark.parametrize(("max_staleness", "verify"), rarely([(0, 0), (2, 0), (0, 1)], kept=[(2, 0)]))
def test_two_ranks_of_a_peer_beside_another_one_take_the_same_steps_wherever_the_owner_ends(
    max_staleness: int, verify: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = TOML.format(start=2, quorum=2).replace("[rounds]", f"[rounds]\nmax_staleness = {max_staleness}")
    toml += "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    theta, config = vectors(SIZES, 0), None
    if verify:
        values = {key: section for key, section in tomllib.loads(toml).items() if key != "server"}
        config = RunConfig.from_mapping({**values, "swarm": {"parts": 1, "verify": verify}})
    with trained(tmp_path, monkeypatch, SCHEMA, theta, toml, config=config) as at, ThreadPoolExecutor() as pool:
        at.call(at.swarm.enrol("two", "o"))
        gate = threading.Barrier(3, timeout=TRAINS_S)
        two, one = Sharded(at, "two", gate), Sharded(at, "o", gate)
        of_two = pool.submit(at_every_rank, 2, lambda ranks: two.train(ranks, shards(ranks.rank), POINTS))
        of_one = pool.submit(one.train, ALONE, [Shard(fragment) for fragment in SCHEMA.fragments], POINTS)
        expected = []
        for outer_step in range(len(POINTS)):
            both = zip(theta, deltas("o", outer_step), deltas("two", outer_step), strict=True)
            theta = [part - (a + b) / 2 for part, a, b in both]
            expected.append(digest(theta))
        assert [*of_two.result(), of_one.result()] == [expected] * 3
    assert len(at.ended) == len(POINTS)
