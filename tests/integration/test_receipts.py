"""Receipts of the audit log between real peers and a real coordinator: an honest run goes on, a lie ends the peers' part in it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn

from aggregator.storage.state_folder import StateFolder
from edit import Collective, EditWorker, WorkerConfig
from edit.config.run import RunConfig
from edit.errors import RefusedError
from editpb.audit_log import LogVerifier
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.receipts import FAULT, KEY, RECEIPTS, verify_kept
from peers.carriers.io_thread import IoThread
from tests.support.running import Running, address, enter_together, running
from tests.support.served import new_folder

EVERY = 2
TOML = """
name = "receipts"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = {steps}
{sync}
[rounds]
start_peers = {peers}
quorum = {peers}
{rounds}
[audit]
enabled = true
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
{more}
"""


def toml(steps: int = 3, sync: str = "", peers: int = 2, more: str = "", rounds: str = "") -> str:
    return TOML.format(steps=steps, sync=sync, peers=peers, more=more, rounds=rounds)


@dataclass
class Member:
    """A peer with a folder, a key, a model and data of its own."""

    name: str
    collective: HubCollective
    settings: RunConfig
    home: Path
    worker: EditWorker = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.worker = EditWorker(self.model, self.optimizer, self.collective, WorkerConfig.of(self.settings))
        self.draw = torch.Generator().manual_seed(ord(self.name))

    def step(self) -> None:
        inputs, targets = torch.randn(5, 6, generator=self.draw), torch.randn(5, 3, generator=self.draw)
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def fault(self) -> str:
        """What its folder says did not fit; ''."""
        path = self.home / FAULT
        return str(json.loads(path.read_text())["fault"]) if path.exists() else ""


@contextmanager
def members(folder: StateFolder, here: Running, homes: Path, names: str = "ab") -> Iterator[dict[str, Member]]:
    """Peers that attend, each with the home of its name; those that were there before have the same key."""
    settings = folder.config()
    with ExitStack() as stack:
        io = stack.enter_context(IoThread())
        found = {}
        for name in names:
            home = homes / name
            home.mkdir(exist_ok=True)
            if not (home / "peer.key").exists():
                for file, data in zip(("peer.key", "peer.pem"), here.served.certificate(name), strict=True):
                    (home / file).write_bytes(data)
            key, certificate = ((home / file).read_bytes() for file in ("peer.key", "peer.pem"))
            credentials = grpc.ssl_channel_credentials(here.served.ca, key, certificate)
            channels = Channels([address(folder)], credentials)
            hub = HubCollective(io, channels, Identity(folder.run_id, "peer", name), key=key, receipts=home)
            stack.callback(hub.close)
            found[name] = Member(name, hub, settings, home)
        enter_together(stack, [one.worker for one in found.values()])
        yield found


def exchange(members: Mapping[str, Member]) -> None:
    """One exchange of all, who wait for its outcome."""
    for _ in range(EVERY):
        for one in members.values():
            one.step()
    for one in members.values():
        one.worker.synchronize()


def log_of(folder: StateFolder) -> LogVerifier:
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    log.check_head((folder.path / "audit-log.head").read_bytes())
    return log


def test_an_honest_run_goes_on(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(3))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        for _ in range(3):
            exchange(two)
        assert {one.worker.outer_step for one in two.values()} == {3}
    log = log_of(folder)
    assert log.key is not None
    for one in two.values():
        found = verify_kept(one.home)
        assert (found.receipts, found.first_step, found.last_step) == (3, 1, 3)
        assert found.head.root == log.tree.root(found.head.size) and found.key == log.key
        assert (one.home / KEY).read_text().strip() == log.key.text()
    lines = [json.loads(line) for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines()]
    seen = [
        [len(given.get("seen", ())) for given in line["contributions"].values()] for line in lines if line["kind"] == "commit"
    ]
    assert seen == [[0, 0], [1, 1], [1, 1]]
