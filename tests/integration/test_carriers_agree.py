"""One answer from all carriers: a real coordinator, a swarm of real hosts, the in-process run, reference.py; same inputs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit.reference as reference
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from edit import CodecConfig, Collective, EditWorker, LocalRun, RunConfig, WorkerConfig
from edit.collective import CompositeCollective
from edit.replica.ranks import Ranks
from edit.replica.replica import Replica
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm.connect import connect_swarm
from tests.support.council.trained import POINTS, trained
from tests.support.running import address, enter_together, running
from tests.support.served import Served, new_folder
from tests.support.settings import worker_config
from tests.support.world import spawn

ROUNDS, EVERY, NAMES = 4, 3, ("a", "b", "c")
TOML = """
name = "agree"
[model]
name = "entry:mine"
[sync]
every = 3
outer_steps = {rounds}
[penalty]
{penalty}
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[codec]
up = "{up}"
down = "{down}"
[rounds]
start_peers = 3
quorum = 3
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(name: str, rounds: int = ROUNDS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(ord(name))
    return [(torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)) for _ in range(rounds * EVERY)]


def train(
    collectives: Mapping[str, Collective | CompositeCollective],
    codec: str | CodecConfig,
    rounds: int = ROUNDS,
    before: Callable[[int], None] = lambda _: None,
    *,
    threads: bool = False,
) -> dict[str, Tensor]:
    """Interleave the peers' plain loops step by step; returns theta by tensor name after all rounds. before: each of them."""
    with ExitStack() as stack:
        peers = []
        for name, collective in collectives.items():
            network = model()
            optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
            worker = EditWorker(network, optimizer, collective, worker_config(every=EVERY, codec=codec))
            peers.append((network, optimizer, worker, batches(name, rounds)))
        if threads:
            enter_together(stack, [worker for _, _, worker, _ in peers])
        else:
            for _, _, worker, _ in peers:
                stack.enter_context(worker)
        for step in range(rounds * EVERY):
            if step % EVERY == EVERY - 1:
                before(step // EVERY)
            for network, optimizer, _, data in peers:
                inputs, targets = data[step]
                nn.functional.mse_loss(network(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        for _, _, worker, _ in peers:
            worker.synchronize()
        assert {worker.outer_step for _, _, worker, _ in peers} == {rounds}
        assert len({worker.digest for _, _, worker, _ in peers}) == 1
        return peers[0][2].outer_state_dict()


def over_grpc(folder: StateFolder, codec: str | CodecConfig, rounds: int = ROUNDS) -> dict[str, Tensor]:
    with running(folder) as here, IoThread() as io:
        collectives = {
            name: HubCollective(
                io, Channels([address(folder)], here.served.credentials(name)), Identity(folder.run_id, "peer", name)
            )
            for name in NAMES
        }
        try:
            return train(collectives, codec, rounds, threads=True)
        finally:
            for collective in collectives.values():
                collective.close()


LOSSY = [
    ("int8", "bf16"),
    ("int4", "e3m0"),
    ("e3m0", "int4:block=64"),
    ("stat2", "stat2"),
    ("sign", "sign"),
    ("topk:k=9", "topk"),
    ("top1", "top1:of=8"),
]


@pytest.mark.sampled(2)
@pytest.mark.covering
@pytest.mark.parametrize(
    "codecs",
    [("fp32", "fp32"), *LOSSY[:1], *(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in LOSSY[1:-2]), *LOSSY[-2:]],
    ids=" ".join,
)
@pytest.mark.parametrize("penalty", ["enabled = true", "enabled = false"])
def test_grpc_and_the_in_process_run_give_the_same_bits(tmp_path: Path, codecs: tuple[str, str], penalty: str) -> None:
    toml = TOML.format(rounds=ROUNDS, penalty=penalty, up=codecs[0], down=codecs[1])
    folder = new_folder(tmp_path / "run", toml=toml)
    carried = over_grpc(folder, codecs[0])
    run = LocalRun(RunConfig.from_toml(folder.run_toml), NAMES)
    local = train({name: run.collective(name) for name in NAMES}, codecs[0])
    assert carried.keys() == local.keys()
    assert all(torch.equal(carried[name], local[name]) for name in local)


def test_contributions_weighed_by_the_whole_model_give_the_same_bits_over_grpc_too(tmp_path: Path) -> None:
    robust = '[robust]\nrule = "geometric_median"\nhostile = 1\nscope = "{}"\n[penalty]\n'
    toml = TOML.format(rounds=ROUNDS, penalty="enabled = true", up="int8", down="bf16")
    thetas = {}
    for scope in ("model", "fragment"):
        folder = new_folder(tmp_path / scope, toml=toml.replace("[penalty]\n", robust.format(scope)))
        run = LocalRun(RunConfig.from_toml(folder.run_toml), NAMES)
        thetas[scope] = train({name: run.collective(name) for name in NAMES}, "int8")
        if scope == "model":
            carried = over_grpc(folder, "int8")
            assert all(torch.equal(carried[name], thetas[scope][name]) for name in carried)
    assert any(not torch.equal(thetas["model"][name], thetas["fragment"][name]) for name in thetas["model"])


MIXED = """up_decay = 0.95
down_decay = 0.5
[codec.fragments.0]
up = "topk:k=3"
down = "e3m0"
[codec.fragments."2*"]
up = "int4:block=64"
[rounds]
"""


def test_codecs_by_fragment_and_decays_give_the_same_bits_over_grpc_too(tmp_path: Path) -> None:
    toml = TOML.format(rounds=ROUNDS, penalty="enabled = true", up="stat2", down="sign").replace("[rounds]\n", MIXED)
    folder = new_folder(tmp_path / "run", toml=toml)
    config = RunConfig.from_toml(folder.run_toml)
    carried, run = over_grpc(folder, config.codec), LocalRun(config, NAMES)
    local = train({name: run.collective(name) for name in NAMES}, config.codec)
    assert all(torch.equal(carried[name], local[name]) for name in local)
    plain = LocalRun(dataclasses.replace(config, codec=dataclasses.replace(config.codec, up_decay=1.0)), NAMES)
    other = train({name: plain.collective(name) for name in NAMES}, plain._config.codec)
    assert not all(torch.equal(other[name], local[name]) for name in local), "the decay counts"


def test_grpc_gives_what_the_naive_diloco_gives(tmp_path: Path) -> None:
    """The oracle knows nothing of fragments, codecs or carriers."""
    toml = TOML.format(rounds=ROUNDS, penalty="enabled = false", up="fp32", down="fp32")
    carried = over_grpc(new_folder(tmp_path / "run", toml=toml), "fp32")
    theta = naive_diloco(ROUNDS)
    for key in theta:
        torch.testing.assert_close(carried[key], theta[key], rtol=1e-5, atol=1e-6)


def naive_diloco(rounds: int) -> dict[str, Tensor]:
    networks = {name: model() for name in NAMES}
    optimizers = {name: torch.optim.AdamW(networks[name].parameters(), lr=0.05) for name in NAMES}
    theta = {name: value.detach().clone() for name, value in model().named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    data = {name: batches(name, rounds) for name in NAMES}
    for round_number in range(rounds):
        for name, network in networks.items():
            with torch.no_grad():
                for key, parameter in network.named_parameters():
                    parameter.copy_(theta[key])
            for step in range(round_number * EVERY, (round_number + 1) * EVERY):
                inputs, targets = data[name][step]
                nn.functional.mse_loss(network(inputs), targets).backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
        for key in theta:
            local = {name: dict(networks[name].named_parameters())[key].detach().clone() for name in NAMES}
            theta[key], momentum[key] = reference.diloco(theta[key], momentum[key], local, 0.7, 0.6)
    return theta


LONG, PARTS, KILLED_EVERY = 12, 2, 5


@pytest.mark.covering
@pytest.mark.parametrize(
    ("penalty", "up", "down", "killed"),
    [
        pytest.param("enabled = false", "fp32", "fp32", False, marks=pytest.mark.exhaustive),
        ("enabled = false", "fp32", "fp32", True),
        pytest.param("enabled = true", "fp32", "fp32", True, marks=pytest.mark.exhaustive),
        pytest.param("enabled = true", "int8", "bf16", False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_swarm_whose_owners_are_killed_gives_the_bits_of_a_hub_and_in_fp32_of_the_naive_diloco(
    penalty: str, up: str, down: str, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """killed: every five outer steps the owner of a part ends in the exchange, at another point of it each time."""
    toml = TOML.format(rounds=LONG, penalty=penalty, up=up, down=down)
    toml += "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    hub = over_grpc(new_folder(tmp_path / "hub", toml=toml), up, LONG)
    replica, points = Replica(model()), iter(POINTS[1:])
    first = [each.clone() for each in replica.founding()]
    with trained(tmp_path, monkeypatch, replica.schema, first, toml, PARTS) as at, ExitStack() as stack:

        def before(outer_step: int) -> None:
            if killed and outer_step and outer_step % KILLED_EVERY == 0:
                at.whole()
                at.point = next(points)

        io = stack.enter_context(IoThread())
        connections = {
            name: stack.enter_context(
                connect_swarm(io, at.addresses(), PARTS, at.credentials(name), Identity(at.swarm.run_id, "peer", name))
            )[0]
            for name in NAMES
        }
        swarm = train(connections, up, LONG, before, threads=True)
    assert len(at.ended) == (2 if killed else 0) and not at.point
    naive = naive_diloco(LONG) if penalty == "enabled = false" else hub
    for key in hub:
        assert torch.equal(swarm[key], hub[key]) and torch.equal(hub[key], naive[key]), key


@dataclass(frozen=True)
class Settings:
    """What a process needs to be one rank of a peer. pems: authority, key, certificate."""

    name: str
    endpoint: str
    run_id: str
    pems: tuple[bytes, bytes, bytes]
    worker: WorkerConfig
    results: Path


@dataclass(frozen=True)
class Result:
    outer_step: int
    digest: str
    theta: dict[str, Tensor]


def pems(run: Served, name: str) -> tuple[bytes, bytes, bytes]:
    authority, key = run.coordinator.authority, new_key()
    certificate = authority.issuer.issue(
        Identity(run.folder.run_id, "peer", name), key.public_key(), lifetime_s=3600, now=time.time()
    )
    authority.members.add(Identity(run.folder.run_id, "peer", name), certificate, time.time())
    return (run.folder.path / "ca.pem").read_bytes(), key_pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def rank_of_a_peer(rank: int, settings: Settings) -> None:
    """One process: a plain loop, over a model that FSDP2 has sharded if there are several.

    All ranks see the whole batch, so the mean of their gradients is the gradient.
    """
    network, ranks = model(), Ranks.world()
    if ranks.size > 1:
        for module in (network[0], network[2], network):
            fully_shard(module)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    channels = Channels([settings.endpoint], grpc.ssl_channel_credentials(*settings.pems))
    with IoThread() as io:
        collective = HubCollective(
            io,
            channels,
            Identity(settings.run_id, "peer", settings.name),
            ranks=ranks,
        )
        try:
            with EditWorker(network, optimizer, collective, settings.worker, ranks) as worker:
                for inputs, targets in batches(settings.name):
                    collective.check()
                    nn.functional.mse_loss(network(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                worker.synchronize()
                result = Result(worker.outer_step, worker.digest, worker.outer_state_dict())
                torch.save(result, settings.results / f"{settings.name}.{rank}")
        finally:
            collective.close()


def replicas_in_one_run(folder: StateFolder, layouts: dict[str, int], config: WorkerConfig) -> dict[str, list[Result]]:
    """The results of every rank of peers that are so many processes each, all training in one run."""
    with running(folder) as here, ThreadPoolExecutor(len(layouts)) as pool:
        settings = {
            name: Settings(name, address(folder), folder.run_id, pems(here.served, name), config, folder.path)
            for name in layouts
        }
        started = [
            pool.submit(spawn, rank_of_a_peer, ranks, _new(folder.path / f"store.{name}"), settings[name])
            for name, ranks in layouts.items()
            if ranks > 1
        ]
        for name in (name for name, ranks in layouts.items() if ranks == 1):
            rank_of_a_peer(0, settings[name])  # this very process
        for each in started:
            each.result()
    return {
        name: [torch.load(folder.path / f"{name}.{rank}", weights_only=False) for rank in range(ranks)]
        for name, ranks in layouts.items()
    }


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_replicas_of_one_two_and_three_ranks_train_in_one_run_as_whole_ones_do(tmp_path: Path) -> None:
    toml = TOML.format(rounds=ROUNDS, penalty="enabled = true", up="fp32", down="fp32")
    folder = new_folder(tmp_path / "run", toml=toml)
    results = replicas_in_one_run(folder, {"a": 1, "b": 2, "c": 3}, worker_config(every=EVERY, codec="fp32"))
    flat = [result for ranks in results.values() for result in ranks]
    assert [result.outer_step for result in flat] == [ROUNDS] * 6
    assert len({result.digest for result in flat}) == 1
    run = LocalRun(RunConfig.from_toml(folder.run_toml), NAMES)
    whole = train({name: run.collective(name) for name in NAMES}, "fp32")
    for ranks in results.values():
        theta = ranks[0].theta
        assert theta.keys() == whole.keys()
        for key in whole:
            torch.testing.assert_close(theta[key], whole[key], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_sharded_replicas_agree_to_the_bit_with_lossy_codecs_groups_and_updates_that_arrive_in_the_forward(
    tmp_path: Path,
) -> None:
    toml = TOML.format(rounds=ROUNDS, penalty="enabled = true", up="int8", down="int8")
    toml = toml.replace("every = 3", 'every = 6\ngroups = 2\nmode = "forward"').replace(
        "start_peers = 3\nquorum = 3", "start_peers = 2\nquorum = 2"
    )
    folder = new_folder(tmp_path / "run", toml=toml)
    results = replicas_in_one_run(folder, {"a": 1, "b": 2}, WorkerConfig.of(RunConfig.from_toml(folder.run_toml)))
    flat = [result for ranks in results.values() for result in ranks]
    assert [result.outer_step for result in flat] == [ROUNDS] * 3
    assert len({result.digest for result in flat}) == 1
