"""The exchange of `exchange.py` in a swarm: each peer has its host beside it, and there are as many parts as members.

An exchange is over when all peers have applied the update of every part: by then a quorum of the hosts has it on disk. What
hosts still do then, to take the outer step, is in their CPU seconds, not in the wall seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.swarm.host import found_swarm
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.member_folder import MemberFolder
from edit.config.run import RunConfig
from edit.council.record import Record, peer_of
from edit.durable_files import write_atomic
from edit.fragments.assignment import assign
from edit.fragments.schema import Schema
from edit.lab.bench.exchange_peer import blocks
from edit.lab.bench.turns import Timing, Turns
from edit.lab.network import QUEUE_MS, Host, Network
from edit.lab.processes import ChildDied, Supervisor
from edit.lab.run_toml import Settings, to_toml
from edit.merging.outer_state import OuterState
from editpb.identity import Identity

__all__ = ["ours_in_a_swarm"]

RUN_ID = "bench"
_LIFETIME_S = 86_400.0
_FORMS_WITHIN_S = 120.0


def ours_in_a_swarm(
    peers: int, parameters: int, codec_name: str, repeat: int, limit_s: float, mbit: float = 0.0, *, queue_ms: int = QUEUE_MS
) -> list[Timing]:
    """Return the timings of exchanges between these members. Of a member are the processes peer-N and host-N.

    mbit: of the link that they share, in each direction; 0: all on loopback. queue_ms: in front of each direction of a link.
    Raises ChildDied, ConfigError without such links.
    """
    names = [f"peer-{place}" for place in range(peers)]
    with (
        tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch,
        Network(names, mbit, queue_ms=queue_ms) as network,
        Supervisor(Path(scratch) / "logs") as supervisor,
        Turns(supervisor, limit_s, network) as turns,
    ):
        members = _Members(Path(scratch), _settings(peers, codec_name, limit_s), blocks(parameters), names)
        for name in names:
            members.start_host(name, network.hosts[name], supervisor)
        members.wait(supervisor, "the members do not agree on who owns which part", members.is_spread)
        for name in names:
            peer = (str(members.path / name), members.address(name), str(parameters), codec_name)
            turns.start(name, (sys.executable, "-m", "edit.lab.bench.exchange_peer", *peer))
        return turns.measure(repeat, beside=[_host(name) for name in names], settle=True)


def _host(name: str) -> str:
    """Return the name of the process beside a peer."""
    return name.replace("peer", "host")


def _settings(peers: int, codec_name: str, limit_s: float) -> Settings:
    """Return the settings of a run that is a coordinator's but for the section swarm."""
    return {
        "name": "bench",
        "model": {"name": "entry:mine"},
        "sync": {"every": 1, "outer_steps": 1_000_000},
        "codec": {"up": codec_name, "down": codec_name},
        "rounds": {"start_peers": peers, "quorum": peers, "ceiling_s": max(600.0, limit_s)},
        "storage": {"checkpoint_every": 1000, "keep_updates": 1, "buffer_bytes": 8 << 30},
        "membership": {"heartbeat_s": 2.0, "lease_s": 60.0},
        "swarm": {"parts": peers, "discovery": "addresses"},
    }


class _Members:
    """The folders of a swarm's members, with certificates; the first has founded it."""

    def __init__(self, path: Path, settings: Settings, schema: Schema, names: Sequence[str]) -> None:
        self.path, self._names, self._hosts = path, names, dict[str, Host]()
        text = to_toml(settings)
        config = RunConfig.from_mapping(tomllib.loads(text))
        assert config.swarm is not None
        (path / "run").mkdir()
        authority = Authority.create(path / "run", RUN_ID, now=time.time())
        for name in names:
            self._equip(name, authority, text, schema)
        parts = [schema.subset(ids) for ids in assign(schema, config.swarm.parts)]
        first = [OuterState(part, config, [torch.zeros(each.numel) for each in part.fragments]) for part in parts]
        found_swarm(RUN_ID, names[0], config, MemberFolder(path / names[0]), first, incarnation=1)

    def _equip(self, name: str, authority: Authority, run_toml: str, schema: Schema) -> None:
        folder, key, identity = self.path / name, new_key(), Identity(RUN_ID, "peer", name)
        folder.mkdir()
        certificate = authority.issuer.issue(identity, key.public_key(), lifetime_s=_LIFETIME_S, now=time.time())
        write_atomic(folder / "peer.key", key_pem(key), mode=0o600)
        write_atomic(folder / "peer.pem", certificate.public_bytes(serialization.Encoding.PEM))
        write_atomic(folder / "ca.pem", (self.path / "run" / "ca.pem").read_bytes())
        write_atomic(folder / "run.toml", run_toml.encode())
        write_atomic(folder / "schema.json", schema.to_json().encode())

    def start_host(self, name: str, host: Host, supervisor: Supervisor) -> None:
        """Start a member's host; return when it listens. It knows those that were started before."""
        folder = self.path / name
        seeds = {other: (self.address(other),) for other in self._hosts}
        HostFolder(listen=f"{host.address}:0", advertise=host.address, seeds=seeds).save(folder)
        self._hosts[name] = host
        supervisor.start(_host(name), host.command((sys.executable, "-m", "aggregator.swarm", str(folder))))
        self.wait(supervisor, f"{_host(name)} does not serve", lambda: MemberFolder(folder).port() > 0)

    def address(self, name: str) -> str:
        """Return HOST:PORT of a member's host."""
        return f"{self._hosts[name].address}:{MemberFolder(self.path / name).port()}"

    def is_spread(self) -> bool:
        """Return whether by all that lies on disk all members vote, and each owns a part."""
        return all(record is not None and self._has_all(record) for record in map(self._record, self._names))

    def _has_all(self, record: Record) -> bool:
        voters, owners = {*map(peer_of, record.voters)}, {part.owner for part in record.parts}
        return voters == owners == {*self._names} and not record.before

    def _record(self, name: str) -> Record | None:
        saved = MemberFolder(self.path / name).saved()
        return saved.record if saved is not None else None

    @staticmethod
    def wait(supervisor: Supervisor, otherwise: str, condition: Callable[[], bool]) -> None:
        """Wait until it is true. Raises ChildDied when a process ends, or after a while."""
        give_up = time.monotonic() + _FORMS_WITHIN_S
        while not condition():
            for end in supervisor.ended():
                if not end.expected:
                    raise ChildDied(str(end))
            if time.monotonic() > give_up:
                raise ChildDied(f"{otherwise} within {_FORMS_WITHIN_S:.0f} s")
            time.sleep(0.05)
