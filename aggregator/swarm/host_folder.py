"""The folder that a host process is started with: its certificate, the run's settings, where it listens and whom it knows.

peer.key, peer.pem, ca.pem    as in a peer's folder: they say who it is
run.toml         the run's settings, which all members have in the same bytes
schema.json      the model, where it is not a built-in one
host.json        what is local: `HostFolder`
members.json     which certificates of peers were seen
authority/       where this member can let others in: the run's certificate authority (`aggregator.security.authority`)
and what `member_folder` has
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path

import grpc
from blake3 import blake3
from cryptography import x509

from aggregator.security.members import Members
from edit.config.run import RunConfig, SwarmConfig, is_address
from edit.council.machine import Timing
from edit.council.record import MOST_ADDRESSES
from edit.durable_files import read_json, read_private, write_json
from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.assignment import assign
from edit.fragments.schema import Schema
from editpb.identity import Identity, from_certificate
from editpb.invitation import is_endpoint, is_maddr
from editpb.server_certificate import ServerCertificate

__all__ = [
    "AUTHORITY_FORMAT",
    "HostFolder",
    "Settings",
    "authority_folder",
    "check_dht",
    "check_folder",
    "credentials",
    "identity_of",
    "members",
    "run_of",
    "seeds_of",
]

FORMAT = 2  # of host.json
AUTHORITY_FORMAT = 1  # of authority/run.json
MOST_SEEDS = 64  # members
# A round lasts ceiling_s, twice that where an inner step was measured to take so long, and then it is merged and offered.
STALL_CEILINGS = 3.0
_log = logging.getLogger(__name__)
_NOT_INSTALLED = "the DHT needs hivemind, on Linux x86-64: pip install 'edit-localsgd[swarm]'"


def check_dht(what: str) -> None:
    """Raise ConfigError unless the DHT can be used. what: that needs it."""
    if find_spec("hivemind") is None:
        raise ConfigError(f"{what}: {_NOT_INSTALLED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """What host.json says. Raises ConfigError for what cannot be."""

    listen: str = "127.0.0.1:0"  # HOST:PORT; port 0 is chosen once
    advertise: str = ""  # the host at which others reach it; empty: nobody does
    relay: str = ""  # HOST:PORT of a relay by which others reach it, in place of that; empty: none
    seeds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # HOST:PORT of members to begin with
    discovery: str = ""  # as swarm.discovery in run.toml, which it goes before here; '': what that says
    dht_peers: tuple[str, ...] = ()  # multiaddresses of nodes of the DHT to begin with, members or not
    dht_port: int = 0  # that this member's node binds, at the host of `listen`; 0: one that is chosen once

    def __post_init__(self) -> None:
        if not is_address(self.listen):
            raise ConfigError(
                f"--listen {self.listen!r:.80}: must be HOST:PORT, with an IPv6 address in brackets; port 0 chooses one"
            )
        if self.discovery not in ("", "auto", "addresses", "dht"):
            raise ConfigError(f"discovery = {self.discovery!r:.80}: must be auto, addresses or dht")
        if wrong := next((each for each in self.dht_peers if not is_maddr(each)), None):
            raise ConfigError(f"dht_peers: {wrong!r:.200} is not like /ip4/192.0.2.1/tcp/4001/p2p/12D3...")
        if not 0 <= self.dht_port < 1 << 16:
            raise ConfigError(f"dht_port = {self.dht_port!r:.80}: must be a port, or 0")
        if self.advertise and not is_endpoint(f"{self.advertise}:1"):
            raise ConfigError(f"--advertise {self.advertise!r:.80}: must be a host name or an address, without a port")
        if self.relay and not is_endpoint(self.relay):
            raise ConfigError(f"--relay {self.relay!r:.80}: must be HOST:PORT, as the relay listens")
        if self.relay and self.advertise:
            raise ConfigError(
                f"--relay {self.relay}: not with --advertise {self.advertise}; a relay is for a member that nobody can dial"
            )
        for peer_id, addresses in self.seeds.items():
            Identity("run", "peer", peer_id)
            if wrong := next((each for each in addresses if not is_endpoint(each)), ""):
                raise ConfigError(f"the address {wrong!r:.80} of {peer_id}: must be HOST:PORT")

    @classmethod
    def load(cls, path: Path) -> HostFolder:
        """Read host.json; without it, all is as by default. Raises ConfigError, FormatError; both name the file."""
        file = path / "host.json"
        try:
            values = read_json(file, version=FORMAT)
            if unknown := values.keys() - {each.name for each in fields(cls)}:
                raise ConfigError(f"unknown: {', '.join(sorted(unknown))}")
            values["seeds"] = {str(peer_id): tuple(map(str, each)) for peer_id, each in values.get("seeds", {}).items()}
            values["dht_peers"] = tuple(map(str, values.get("dht_peers", ())))
            return cls(**values)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
        except (ConfigError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: {error}") from error

    def save(self, path: Path) -> None:
        """Write host.json. Raises StorageError."""
        write_json(path / "host.json", asdict(self), version=FORMAT)

    def with_seeds(self, seeds: Mapping[str, tuple[str, ...]]) -> HostFolder:
        """Return it with these members to begin with, and those that it has: MOST_SEEDS at most."""
        names = [*dict.fromkeys((*seeds, *self.seeds))][:MOST_SEEDS]
        merged = {each: dict.fromkeys((*seeds.get(each, ()), *self.seeds.get(each, ()))) for each in names}
        return replace(self, seeds={each: tuple(found)[:MOST_ADDRESSES] for each, found in merged.items()})

    def uses_dht(self, swarm: SwarmConfig) -> bool:
        """Return whether the DHT is to be used; only then import `aggregator.swarm.discovery`. Raises ConfigError."""
        installed, discovery = find_spec("hivemind") is not None, self.discovery or swarm.discovery
        if discovery == "dht" and not installed:
            raise ConfigError(f'discovery = "dht": {_NOT_INSTALLED}; discovery = "addresses" works without')
        if self.dht_peers and not installed and discovery != "addresses":
            raise ConfigError(f'--dht-peers: {_NOT_INSTALLED}; without, set discovery = "addresses" in host.json')
        if discovery == "auto" and not installed:
            _log.info("members are found by their addresses alone: %s", _NOT_INSTALLED)
        return installed and discovery != "addresses"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all members of a run have in common, as bytes: run.toml, and schema.json (empty: a built-in model)."""

    run_toml: bytes
    schema: bytes = b""

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read both files. Raises ConfigError."""
        file, schema = path / "run.toml", path / "schema.json"
        try:
            return cls(file.read_bytes(), schema.read_bytes() if schema.exists() else b"")
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def config(self) -> RunConfig:
        """Return what run.toml says. Raises ConfigError."""
        return RunConfig.from_text(self.run_toml, "run.toml")

    @property
    def config_hash(self) -> str:
        """What the record says of run.toml."""
        return blake3(self.run_toml).hexdigest()

    def swarm(self, config: RunConfig) -> SwarmConfig:
        """Return the section [swarm]. Raises ConfigError when there is none."""
        if config.swarm is None:
            raise ConfigError(
                "run.toml has no section [swarm]; add one (it may be empty), and remove [server] and [aggregators]"
            )
        return config.swarm

    def timing(self, config: RunConfig) -> Timing:
        """Return how fast the council notices. Raises ConfigError."""
        swarm = self.swarm(config)
        return Timing(
            heartbeat_s=swarm.heartbeat_s,
            lease_s=swarm.lease_s,
            forget_s=swarm.forget_s,
            verify_s=swarm.verify_s,
            stall_s=STALL_CEILINGS * config.rounds.ceiling_s,
            stall_peers=max(1, config.rounds.quorum - 1),
        )

    def schemas(self, config: RunConfig) -> tuple[tuple[range, Schema], ...]:
        """Return the fragments of each part, and their schema. Raises ConfigError."""
        from aggregator.control.schemas import builtin_schema  # imports torch, which most commands can do without

        schema, parts = builtin_schema(config), self.swarm(config).parts
        if schema is None:
            try:
                schema = Schema.from_json(self.schema.decode())
            except (RemoteProtocolError, UnicodeDecodeError) as error:
                raise ConfigError(f"schema.json, which says what the model consists of: {error}") from error
        if parts > len(schema.fragments):
            raise ConfigError(
                f"swarm.parts = {parts}: the model has {len(schema.fragments)} fragments; a part needs at least one"
            )
        return tuple((ids, schema.subset(ids)) for ids in assign(schema, parts))


def authority_folder(path: Path) -> Path:
    """Return where the run's authority is, if this member has it."""
    return path / "authority"


def check_folder(path: Path) -> None:
    """Raise ConfigError unless this is the folder of somebody who has redeemed an invitation, or has founded a swarm."""
    if not (path / "peer.pem").exists():
        raise ConfigError(f"{path}: is not the folder of a member; name it with --home")


def run_of(path: Path) -> str:
    """Return the run whose authority this member has. Raises ConfigError."""
    file = authority_folder(path) / "run.json"
    try:
        return str(read_json(file, version=AUTHORITY_FORMAT)["run_id"])
    except FileNotFoundError:
        check_folder(path)
        raise ConfigError(f"{path}: has no authority: ask whoever founded the swarm for an invitation") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: is damaged; restore it from a copy ({error})") from error


def seeds_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the addresses by peer_id that words NAME=HOST:PORT mean; `HostFolder` checks them."""
    seeds: dict[str, tuple[str, ...]] = {}
    for each in words:
        peer_id, _, address = each.partition("=")
        seeds[peer_id] = (*seeds.get(peer_id, ()), address)
    return seeds


def identity_of(path: Path) -> Identity:
    """Return whom the folder's certificate names. Raises ConfigError, RefusedError."""
    file = path / "peer.pem"
    try:
        return from_certificate(x509.load_pem_x509_certificate(file.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); join with an invitation first") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged; join with a new invitation") from error


def credentials(path: Path) -> tuple[grpc.ChannelCredentials, grpc.ServerCredentials]:
    """Return those of this member as a client, and as a server. Raises ConfigError."""
    key, certificate, authority = (path / name for name in ("peer.key", "peer.pem", "ca.pem"))
    server = ServerCertificate(key, certificate, authority).credentials()
    client = grpc.ssl_channel_credentials(authority.read_bytes(), read_private(key), certificate.read_bytes())
    return client, server


def members(path: Path) -> Members:
    """Return which peers were seen here; who was evicted, the record says. Raises StorageError."""
    return Members(path / "members.json", new=True, enrols=False)
