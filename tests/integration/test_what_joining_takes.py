"""What joining a real run takes over the network: nothing that the peer has already. Bytes are counted by a link between."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from aggregator.control.run import Run
from edit.codecs import codec
from edit.collective import CompositeCollective
from edit.fragments.digest import combine, fragment_hash
from edit.fragments.schema import FragmentSpec
from edit.lab.link import Link, LinkShape
from edit.records import Committed
from edit.replica.replica import Replica
from edit.worker.worker import EditWorker, WorkerConfig
from editpb.identity import Identity
from editpb.messages import Heartbeat, PeerState
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective, Siblings
from peers.carriers.hub.control_stream import Report
from peers.carriers.hub.downlink import Downlink
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from tests.support.running import Running, address, running
from tests.support.served import TOML, new_folder

TOTAL = 4 * 1024 * 1025  # bytes of the parameters in fp32
LITTLE = TOTAL // 10


@dataclass
class Home:
    """What a peer keeps from one life to the next, where there is an audit log."""

    folder: Path
    certificate: tuple[bytes, bytes]


class Peer:
    """One life of a peer; every model of a seed is the same."""

    def __init__(self, worker: EditWorker, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link) -> None:
        self.worker, self.model, self.optimizer, self.link = worker, model, optimizer, link

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes sent and received in this life."""
        up, down = self.link.carried_bytes
        return up, down

    def round(self) -> None:
        """As many optimizer steps as are between two exchanges, and the exchange."""
        for _ in range(2):
            self.model(torch.ones(2, 1024)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.worker.synchronize()


@contextmanager
def life(
    here: Running, name: str, *, seed: int = 0, saved: dict[str, Any] | None = None, home: Home | None = None
) -> Iterator[Peer]:
    host, _, port = address(here.served.folder).rpartition(":")
    torch.manual_seed(seed)
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Link((host, int(port)), LinkShape()) as link, IoThread() as io:
        key, certificate = home.certificate if home else here.served.certificate(name)
        channels = Channels([f"127.0.0.1:{link.port}"], grpc.ssl_channel_credentials(here.served.ca, key, certificate))
        identity = Identity(here.served.folder.run_id, "peer", name)
        collective = HubCollective(io, channels, identity, site=Site(key=key, receipts=home.folder if home else None))
        try:
            worker = EditWorker(model, optimizer, collective, WorkerConfig.of(here.served.folder.config()), leave="local")
            if saved is not None:
                model.load_state_dict(saved["model"])
                worker.load_state_dict(saved["worker"])
            with worker:
                yield Peer(worker, model, optimizer, link)
        finally:
            collective.close()


@pytest.mark.timeout(120)
def test_the_founder_and_who_has_the_same_model_or_an_exact_checkpoint_take_nothing(tmp_path: Path) -> None:
    with running(new_folder(tmp_path / "run")) as here:
        with life(here, "a") as a:
            assert a.carried[0] > TOTAL > LITTLE > a.carried[1]
            with life(here, "same") as same:
                assert max(same.carried) < LITTLE and same.worker.digest == a.worker.digest
            with life(here, "other", seed=1) as other:
                assert other.carried[1] > TOTAL and other.worker.digest == a.worker.digest
            for _ in range(2):
                a.round()
            assert a.worker.outer_step == 2
            saved = {"model": a.model.state_dict(), "worker": a.worker.state_dict()}
            local = [parameter.clone() for parameter in a.model.parameters()]
        with life(here, "a", saved=saved) as again:
            assert max(again.carried) < LITTLE and again.worker.outer_step == 2
            assert all(torch.equal(before, now) for before, now in zip(local, again.model.parameters(), strict=True))
            again.round()
            assert again.worker.outer_step == 3
        with life(here, "a", saved=saved) as late:
            assert late.carried[1] > TOTAL and late.worker.outer_step == 3


LATE = {"one int8 update": ("int8", 1), "three int8 updates": ("int8", 3), "bf16": ("bf16", 1)}


@pytest.mark.covering
@pytest.mark.parametrize("audit", [False, True], ids=["", "audited"])
@pytest.mark.parametrize("name", LATE)
@pytest.mark.timeout(120)
def test_who_is_a_little_behind_takes_the_updates_and_nobody_waits_for_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, audit: bool
) -> None:
    down, steps = LATE[name]
    toml = TOML.replace('down = "fp32"', f'down = "{down}"') + "[audit]\nenabled = true\n" * audit
    said: list[tuple[PeerState, int]] = []
    heard = Run.heartbeat

    def heartbeat(self: Run, attendance: Any, heartbeat: Heartbeat) -> None:
        said.append((heartbeat.state, heartbeat.outer_step))
        heard(self, attendance, heartbeat)

    with running(new_folder(tmp_path / "run", toml=toml)) as here:
        home = Home(tmp_path, here.served.certificate("a")) if audit else None
        with life(here, "a", home=home) as a:
            a.round()
            saved = copy.deepcopy({"model": a.model.state_dict(), "worker": a.worker.state_dict()})
            for _ in range(steps):
                a.round()
            theta = a.worker.outer_state_dict()
        monkeypatch.setattr(Run, "heartbeat", heartbeat)
        with life(here, "a", saved=saved, home=home) as late:
            update = codec(down).encoded_size(TOTAL // 4)
            assert steps * update < late.carried[1] < steps * update + LITTLE
            assert late.worker.outer_step == steps + 1
            assert all(torch.equal(theta[key], value) for key, value in late.worker.outer_state_dict().items())
            assert all(torch.equal(theta[key], value) for key, value in late.model.state_dict().items())
            late.round()
            assert late.worker.outer_step == steps + 2
    before = [state for state, step in said if step < steps + 1]
    assert set(before) <= {PeerState.STARTING} and PeerState.TRAINING in {state for state, _ in said}


@pytest.mark.timeout(120)
def test_a_checkpoint_that_the_updates_do_not_fit_is_left_for_a_snapshot(tmp_path: Path) -> None:
    """The coordinator's folder is another run's with the same id, name by name."""
    with running(new_folder(tmp_path / "run", toml=TOML.replace('down = "fp32"', 'down = "int8"'))) as here:
        with life(here, "a") as a:
            saved = copy.deepcopy({"model": a.model.state_dict(), "worker": a.worker.state_dict()})
            a.round()
            digest = a.worker.digest
        for theta in saved["worker"]["outer"].values():
            theta += 1
        replica = Replica(nn.Linear(1024, 1024))
        saved["worker"]["scalars"]["holds"] = combine(
            [fragment_hash(flat(saved, fragment)) for fragment in replica.schema.fragments]
        )
        with life(here, "a", saved=saved) as late:
            assert late.carried[1] > TOTAL and late.worker.digest == digest


def flat(saved: dict[str, Any], fragment: FragmentSpec) -> torch.Tensor:
    return torch.cat([saved["worker"]["outer"][tensor.name].flatten() for tensor in fragment.tensors])


@contextmanager
def life_of_two(both: Sequence[Running], saved: dict[str, Any] | None = None) -> Iterator[tuple[EditWorker, nn.Module]]:
    """Of a peer of a run with two aggregators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with IoThread() as io:
        siblings, collectives = Siblings(2), list[HubCollective]()
        for number, here in enumerate(both):
            channels = Channels([address(here.served.folder)], here.served.credentials("a"))
            identity = Identity(here.served.folder.run_id, "peer", "a")
            collectives.append(HubCollective(io, channels, identity, siblings=siblings, aggregator=number))
        settings = WorkerConfig.of(both[0].served.folder.config())
        worker = EditWorker(model, optimizer, CompositeCollective(collectives), settings, leave="local")
        if saved is not None:
            worker.load_state_dict(saved)
        try:
            with worker:
                if saved is None:
                    train(worker, model, optimizer)
                yield worker, model
        finally:
            for one in collectives:
                one.close()


def train(worker: EditWorker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    worker.synchronize()


@pytest.mark.timeout(120)
def test_no_aggregator_waits_for_a_peer_that_takes_the_updates_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    say, update = Report.say, Downlink._update

    def noted(self: Report, heartbeat: Heartbeat) -> bool:
        told.append(heartbeat.state.name)
        return say(self, heartbeat)

    async def fetched(self: Downlink, outer_step: int) -> Committed:
        told.append("update")
        return await update(self, outer_step)

    toml = TOML.replace('down = "fp32"', 'down = "int8"')
    with running(new_folder(tmp_path / "one", toml=toml)) as one, running(new_folder(tmp_path / "two", toml=toml)) as two:
        with life_of_two([one, two]) as (worker, _):
            behind = copy.deepcopy(worker.state_dict())
        with life_of_two([one, two]) as (worker, _):
            saved = copy.deepcopy(worker.state_dict())
        saved["scalars"]["shares"][0] = behind["scalars"]["shares"][0]  # the first aggregator went on without this peer
        for kind in saved.keys() - {"scalars"}:
            saved[kind] |= {name: tensor for name, tensor in behind[kind].items() if name.startswith("0.")}
        monkeypatch.setattr(Report, "say", noted)
        monkeypatch.setattr(Downlink, "_update", fetched)
        with life_of_two([one, two], saved) as (worker, _):
            assert [share.outer_step for share in worker.shares] == [2, 2]
    assert told.index("update") < told.index("TRAINING")
