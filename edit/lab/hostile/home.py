"""The folder of an attacker: a peer, an observer and an evicted peer of one run, each enrolled with its own invitation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edit.lab.joining import enrol
from edit.lab.observer import Observer
from peers.identity.peer_folder import PeerFolder

__all__ = ["HostileHome"]


@dataclass(frozen=True, slots=True)
class HostileHome:
    """The files of one attacker. It has no identity until `enrol`."""

    path: Path

    @property
    def member(self) -> PeerFolder:
        """A peer in good standing."""
        return PeerFolder(self.path / "member")

    @property
    def observer(self) -> PeerFolder:
        """An observer."""
        return PeerFolder(self.path / "observer")

    @property
    def evicted(self) -> PeerFolder:
        """A peer that the operator has evicted."""
        return PeerFolder(self.path / "evicted")

    @property
    def enrol_listen(self) -> str:
        """HOST:PORT where invitations are redeemed. Raises OSError before `enrol`."""
        return str(json.loads((self.path / "run.json").read_text())["enrol_listen"])

    def enrol(self, name: str, state: Path, operator: Observer) -> None:
        """Enrol `name`, `name`-observer and `name`-evicted in the run that is served from `state`, and evict the last one."""
        enrol(state, name, self.member.path)
        enrol(state, f"{name}-observer", self.observer.path, role="observer")
        enrol(state, f"{name}-evicted", self.evicted.path)
        operator.evict(f"{name}-evicted", "for the lab")
        addresses = json.loads((state / "addresses.json").read_text())
        (self.path / "run.json").write_text(json.dumps({"enrol_listen": addresses["enrol_listen"]}))
