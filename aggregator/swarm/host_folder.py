"""The folder that a host process is started with: where it listens, whom it knows, its certificate and the run's settings.

host.json        who it is, and where: `HostFolder`
run.toml         the run's settings
peer.key, peer.pem, ca.pem    as in a peer's folder
schema.json      the model, where it is not a built-in one
members.json     which certificates of peers were seen
and what `member_folder` has
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

import grpc

from aggregator.control.schemas import builtin_schema
from aggregator.security.members import Members
from edit.config.run import RunConfig
from edit.council.machine import Timing
from edit.durable_files import read_json, read_private, write_json
from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.assignment import assign
from edit.fragments.schema import Schema
from editpb.identity import Identity
from editpb.invitation import is_maddr
from editpb.server_certificate import ServerCertificate

__all__ = ["HostFolder", "credentials", "members"]

_log = logging.getLogger(__name__)
FORMAT = 1  # of host.json
_NOT_INSTALLED = "the DHT needs hivemind, on Linux x86-64: pip install 'edit-localsgd[swarm]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """What host.json says. heartbeat_s, lease_s, forget_s: see `edit.council.machine.Timing`; with parts equal at all members.

    Raises ConfigError for what cannot be.
    """

    run_id: str
    peer_id: str
    parts: int  # that the model is cut into
    listen: str = "127.0.0.1:0"  # HOST:PORT; port 0 is chosen once
    advertise: str = ""  # the host at which others reach it; empty: nobody does
    seeds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # HOST:PORT of members to begin with
    discovery: str = "auto"  # "dht": with hivemind's DHT, too; "addresses": without; "auto": with it where it is installed
    dht_peers: tuple[str, ...] = ()  # multiaddresses of nodes of the DHT to begin with, members or not
    dht_port: int = 0  # that this member's node binds, at the host of `listen`; 0: one that is chosen once
    heartbeat_s: float = 0.25
    lease_s: float = 1.0
    forget_s: float = 60.0

    def __post_init__(self) -> None:
        Identity(self.run_id, "peer", self.peer_id)
        host, _, port = self.listen.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ConfigError(f"listen = {self.listen!r:.80}: must be HOST:PORT")
        if self.discovery not in ("auto", "addresses", "dht"):
            raise ConfigError(f"discovery = {self.discovery!r:.80}: must be auto, addresses or dht")
        if wrong := next((each for each in self.dht_peers if not is_maddr(each)), None):
            raise ConfigError(f"dht_peers: {wrong!r:.200} is not like /ip4/192.0.2.1/tcp/4001/p2p/12D3...")
        if not 0 <= self.dht_port < 1 << 16:
            raise ConfigError(f"dht_port = {self.dht_port!r:.80}: must be a port, or 0")

    @classmethod
    def load(cls, path: Path) -> HostFolder:
        """Read host.json. Raises ConfigError, FormatError; both name the file."""
        file = path / "host.json"
        try:
            values = read_json(file, version=FORMAT)
            if unknown := values.keys() - {each.name for each in fields(cls)}:
                raise ConfigError(f"unknown: {', '.join(sorted(unknown))}")
            values["seeds"] = {str(peer_id): tuple(map(str, each)) for peer_id, each in values.get("seeds", {}).items()}
            values["dht_peers"] = tuple(map(str, values.get("dht_peers", ())))
            return cls(**values)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
        except (ConfigError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: {error}") from error

    def save(self, path: Path) -> None:
        """Write host.json. Raises StorageError."""
        write_json(path / "host.json", asdict(self), version=FORMAT)

    def uses_dht(self) -> bool:
        """Return whether the DHT is to be used; only then import `aggregator.swarm.discovery`. Raises ConfigError."""
        installed = find_spec("hivemind") is not None
        if self.discovery == "dht" and not installed:
            raise ConfigError(f'discovery = "dht": {_NOT_INSTALLED}; discovery = "addresses" works without')
        if self.discovery == "auto" and not installed:
            _log.info("members are found by their addresses alone: %s", _NOT_INSTALLED)
        return installed and self.discovery != "addresses"

    @property
    def timing(self) -> Timing:
        """How fast its council notices. Raises ConfigError."""
        try:
            return Timing(heartbeat_s=self.heartbeat_s, lease_s=self.lease_s, forget_s=self.forget_s)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"host.json: {error}") from error

    def schemas(self, path: Path, config: RunConfig) -> tuple[Schema, ...]:
        """Return the schema of each part. Raises ConfigError."""
        schema, file = builtin_schema(config), path / "schema.json"
        if schema is None:
            try:
                schema = Schema.from_json(file.read_text())
            except OSError as error:
                raise ConfigError(f"{file}: cannot be read ({error.strerror}); it says what the model consists of") from error
            except RemoteProtocolError as error:
                raise ConfigError(f"{file}: {error}") from error
        return tuple(map(schema.subset, assign(schema, self.parts)))


def credentials(path: Path) -> tuple[grpc.ChannelCredentials, grpc.ServerCredentials]:
    """Return those of this member as a client, and as a server. Raises ConfigError."""
    key, certificate, authority = (path / name for name in ("peer.key", "peer.pem", "ca.pem"))
    server = ServerCertificate(key, certificate, authority).credentials()
    client = grpc.ssl_channel_credentials(authority.read_bytes(), read_private(key), certificate.read_bytes())
    return client, server


def members(path: Path) -> Members:
    """Return which peers were seen here; who was evicted, the record says. Raises StorageError."""
    return Members(path / "members.json", new=True, enrols=False)
