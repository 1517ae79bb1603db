"""What joining a real run takes over the network: nothing that the peer has already. Bytes are counted by a link between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edit.lab.link import Link, LinkShape
from edit.worker.worker import EditWorker, WorkerConfig
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from tests.support.running import Running, address, running
from tests.support.served import new_folder

TOTAL = 4 * 1024 * 1025  # bytes of the parameters in fp32
LITTLE = TOTAL // 10


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
def life(here: Running, name: str, *, seed: int = 0, saved: dict[str, Any] | None = None) -> Iterator[Peer]:
    host, _, port = address(here.served.folder).rpartition(":")
    torch.manual_seed(seed)
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Link((host, int(port)), LinkShape()) as link, IoThread() as io:
        channels = Channels([f"127.0.0.1:{link.port}"], here.served.credentials(name))
        collective = HubCollective(io, channels, Identity(here.served.folder.run_id, "peer", name))
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
