"""How a folder becomes a member's: by founding a swarm, or by an invitation. Both can be repeated, and go on where they were.

Founding: run.toml, schema.json, the key and the first parameters are written; `python -m aggregator.swarm found` makes the
rest; identity.json, which says that the folder is a member's, is written last.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from safetensors import SafetensorError
from safetensors.torch import save_file

from edit import plugins
from edit.config.presets import founding_text, with_preset
from edit.config.run import RunConfig
from edit.durable_files import write_atomic, write_atomic_with
from edit.errors import ConfigError, RefusedError, RemoteProtocolError, TransportError
from edit.plain_text import parse_toml, quoted
from edit.replica.replica import Replica
from editpb.folder_kinds import refuse_coordinators
from editpb.hours import Hours
from editpb.identity import from_certificate
from editpb.invitation import Invitation, is_loopback
from editpb.validity import Notice
from peers.identity.peer_folder import PeerFolder
from peers.models.registry import build
from peers.swarm.aggregator_process import ask
from peers.swarm.invitations import redeem, seeds_of

__all__ = ["Founding", "Place", "enter", "found", "has_served", "is_member", "same_run"]

_log = logging.getLogger("peers")
REDEEMED = "redeemed.sha256"  # of the token of the invitation that was redeemed into the folder last
THETA = "founding.safetensors"  # the first parameters, until the swarm is founded


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """What a swarm is founded with. allowed, model_folder: as for `peers.models.registry.build`."""

    run_toml: Path
    name: str  # of the founder
    preset: str | None = None  # whose settings are written into its copy of run.toml
    settings: tuple[str, ...] = ()  # SECTION.KEY=VALUE, written into it after the preset's
    allowed: frozenset[str] = frozenset()
    model_folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this member serves, and how much it sends, as the command line says it; None: as before, or by default."""

    listen: str | None = None  # HOST:PORT
    advertise: str | None = None  # the host at which others reach it; '': nobody does
    relay: str | None = None  # HOST:PORT of a relay by which others reach it; '': none
    dht_peers: tuple[str, ...] = ()  # multiaddresses of nodes of the DHT; none: as before
    max_mbit: float | None = None  # what it sends per second, as long as it runs; None: no bound
    hours: str | None = None  # in which a host that does not train takes part; None: always
    allowed: frozenset[str] = frozenset()  # plug-ins that its operator trusts, as long as it runs
    metrics_listen: str | None = None  # HOST:PORT of its /metrics, as long as it runs; None: none

    def arguments(self, home: Path, seeds: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Return what the host is told. seeds: (peer_id, HOST:PORT) of members that are known; none: it founds the swarm.

        By default a member of a swarm that is all on this machine is reached here; elsewhere one that does not say by which
        name others reach it only dials out. Raises ConfigError.
        """
        listen, advertise = self.listen, self.advertise
        new = not has_served(home)
        if self.relay and not advertise:
            advertise, listen = "", listen or "127.0.0.1:0"
        if advertise is None and listen is not None:
            advertise = listen.rpartition(":")[0]
            if advertise in ("0.0.0.0", "[::]"):
                raise ConfigError(f"--listen {listen}: name the host by which others reach it, too: --advertise HOST")
        elif advertise is None and new:
            here = all(is_loopback(address.rpartition(":")[0]) for _, address in seeds)
            advertise = "127.0.0.1" if here else ""
        if listen is None and advertise is not None:
            everywhere = "[::]" if advertise.startswith("[") else "0.0.0.0"
            listen = "127.0.0.1:0" if not advertise or is_loopback(advertise) else f"{everywhere}:0"
        words = []
        if listen is not None:
            words += ["--listen", listen]
        if advertise is not None:
            words += ["--advertise", advertise]
        if self.relay is not None:
            words += ["--relay", self.relay]
        if self.max_mbit is not None:
            words += ["--max-mbit", str(self.max_mbit)]
        if self.hours is not None:
            words += ["--hours", Hours.parse(self.hours).text]
        if self.metrics_listen:
            words += ["--metrics-listen", self.metrics_listen]
        words += [f"--dht-peers={maddr}" for maddr in self.dht_peers]
        words += [f"--allow={name}" for name in sorted(self.allowed)]
        return words + [f"--seed={peer_id}={address}" for peer_id, address in seeds]


def has_served(home: Path) -> bool:
    """Return whether a host has begun in this folder. Raises ConfigError where that cannot be seen."""
    try:
        return (home / "host.json").exists()
    except OSError as error:
        raise ConfigError(f"{home}: cannot be read ({error.strerror})") from error


def is_member(home: Path, *, invited: bool = False) -> bool:
    """Return whether this is the folder of a member of a swarm. Raises ConfigError when it is of another run, or observer's.

    invited: there is an invitation. Then the folder of a member whose key or certificate is lost, damaged or over is none.
    """
    folder = PeerFolder(home)
    if (identity := folder.identity()) is None:
        return False
    if identity.role != "peer":
        raise ConfigError(
            f"{home}: is the folder of {identity.peer_id}, an {identity.role}; watch with it: edit-peer swarm watch"
        )
    try:
        enrolled = folder.load(swarm=True)
    except ConfigError:
        if not invited or not folder.of_swarm():
            raise
        return False
    return not invited or enrolled.validity.notice(time.time()) is not Notice.EXPIRED


def found(home: Path, founding: Founding) -> RunConfig:
    """Found a swarm in `home`, or complete what was begun; return its settings. Raises ConfigError, StorageError."""
    text = _text_of(founding.run_toml)
    refuse_coordinators(home)
    folder, kept = PeerFolder(home), home / "run.toml"
    new = founding.run_toml.resolve() != kept.resolve()
    text = _settled(text, founding.run_toml, founding.preset, founding.settings, new=new)
    config = RunConfig.from_text(text.encode(), founding.run_toml)
    if config.swarm is None:
        raise ConfigError(f"{founding.run_toml}: has no section [swarm]; add one (it may be empty), and remove [server]")
    text = plugins.pin(text, founding.allowed)
    folder.make_private()
    folder.make_key()
    begun = (home / "authority").exists() or (home / "council.json").exists()  # before: nothing names the run yet
    if begun and kept.exists() and kept.read_bytes() != text.encode():
        raise ConfigError(f"{home}: a swarm was founded here with another run.toml; choose another --home")
    write_atomic(kept, text.encode())
    if not (home / "council.json").exists():
        model = build(config.model, config.seed, founding.allowed, folder=founding.model_folder)
        replica = Replica(model)
        write_atomic(home / "schema.json", replica.schema.to_json().encode())
        theta = {str(i): fragment.contiguous() for i, fragment in enumerate(replica.founding())}
        write_atomic_with(home / THETA, lambda file: save_file(theta, file), mode=0o600, failures=(SafetensorError,))
    ask("found", home, founding.name, home / THETA)
    own, authority = (x509.load_pem_x509_certificate((home / name).read_bytes()) for name in ("peer.pem", "ca.pem"))
    der = serialization.Encoding.DER
    folder.store(from_certificate(own), (), own.public_bytes(der), authority.public_bytes(der))
    return config


def same_run(home: Path, run_toml: Path | None, preset: str | None, settings: Sequence[str]) -> bool:
    """Return whether `found` would found the same again. run_toml: None, or none there: the folder's own.

    Comments and blank lines do not count. Raises ConfigError for a preset or settings that cannot be.
    """
    kept = home / "run.toml"
    given = run_toml if run_toml is not None and run_toml.exists() else kept
    texts = [plugins.without_pins(_text_of(each)).strip() for each in (given, kept)]
    if texts[0] == texts[1] and not settings and preset is None:
        return True
    settled = _settled(texts[0], given, preset, settings)
    configs = (RunConfig.from_text(settled.encode(), given), RunConfig.from_toml(kept))
    return len({replace(each, plugins={}).to_json() for each in configs}) == 1


def _text_of(run_toml: Path) -> str:
    try:
        return run_toml.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{run_toml}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{run_toml}: is not UTF-8 text") from error


def _settled(text: str, run_toml: Path, preset: str | None, settings: Sequence[str], *, new: bool = False) -> str:
    """As `founding_text`, of the text with this preset. new: it must not say what `auto` chose for another swarm.

    Raises ConfigError that names the file.
    """
    try:
        if new and "chosen" in parse_toml(text).get("outer", {}):
            rule = "remove it, outer.optimizer, outer.lr and outer.momentum, and auto chooses again"
            raise ConfigError(f"outer.chosen was written when another swarm was founded; {rule}")
        return founding_text(text if preset is None else with_preset(text, preset, settings), settings)
    except ValueError as error:
        raise ConfigError(f"{run_toml}: is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{run_toml}: is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{run_toml}: {error}") from error


def enter(home: Path, invitation: str | None, dht_peers: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Redeem an invitation into `home`, unless it was; return (peer_id, HOST:PORT) of the members that it names.

    Where it cannot be redeemed, because it has expired or was used elsewhere or nobody answers, a member goes on as it is, and
    the log says so.

    dht_peers: nodes of a DHT to look for members in, where nobody that it names answers.

    Raises ConfigError, RefusedError, TransportError, RemoteProtocolError, StorageError.
    """
    invited = Invitation.decode(invitation) if invitation is not None else None
    used = hashlib.sha256(invited.token.encode()).hexdigest().encode() if invited is not None else None
    # What was redeemed here makes no other key: the folder's own may only be away.
    folder, last = PeerFolder(home), _read_or_none(home / REDEEMED)
    member = is_member(home, invited=used is not None and used != last)
    if invitation is None or invited is None or used is None:
        if not member:
            raise ConfigError(f"{home}: is no member of a swarm; run: edit-peer swarm join INVITATION --home {quoted(home)}")
        return []
    if member and invited.identity != folder.identity():
        raise RefusedError(f"{home}: is of another member than the invitation; choose another --home")
    # The same command, with the same invitation, starts a member again: what that enrolled may be on another machine by now.
    if member and last is None and not _is_newer(invited, folder):
        write_atomic(home / REDEEMED, used)
    elif not member or used != last:
        try:
            folder.make_private()
            invited = redeem(invitation, home, dht_peers)
            write_atomic(home / REDEEMED, used)
            _log.info("%s is a member of run %s", invited.identity.peer_id, invited.identity.run_id)
        except (ConfigError, RefusedError, TransportError, RemoteProtocolError) as error:
            if not member:
                raise
            _log.warning("the invitation is not used: %s; %s goes on as before", error, invited.identity.peer_id)
    return seeds_of(invited)


def _is_newer(invited: Invitation, folder: PeerFolder) -> bool:
    """Return whether an invitation was made after the certificate in a member's folder that does not say what it redeemed."""
    if invited.swarm is None:
        return True
    guest = x509.load_der_x509_certificate(invited.swarm.certificate)
    present = x509.load_pem_x509_certificate(folder.load(swarm=True).certificate)
    return guest.not_valid_before_utc > present.not_valid_before_utc


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
