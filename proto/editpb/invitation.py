"""The text that lets one machine become one member: `edit1.` and base64url of a small JSON object. It is a secret.

One to a swarm also names hosts, and has a certificate to call them with: their only port is for those who show one of the run's
authority. That certificate is for the key that follows from the token, names no member, and opens nothing but Enrolment.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edit.errors import ConfigError, RefusedError
from edit.plain_text import parse_json
from editpb.identity import Identity
from editpb.limits import MAX_LOG_KEY_CHARS, is_id

__all__ = [
    "MAX_ENDPOINTS",
    "MAX_TEXT_CHARS",
    "TOKEN",
    "Invitation",
    "SwarmAccess",
    "check_dht_peers",
    "endpoint_of",
    "fingerprint",
    "guest_key",
    "is_endpoint",
    "is_loopback",
    "is_maddr",
    "local_address",
]

VERSION = 1
MAX_TEXT_CHARS = 16_384
MAX_CA_BYTES = 4096  # of a certificate
MAX_ENDPOINTS = 16
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")  # secrets.token_urlsafe(32)
_PREFIX = re.compile(r"edit([0-9]{1,4})\.(.*)", re.DOTALL)
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.%a-z]{2,64}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")
_MADDR = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[A-Za-z0-9.:_-]{1,128}/tcp/[0-9]{1,5}/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_DAMAGED = "the invitation is cut off or altered; copy the whole line again"


def is_endpoint(text: str) -> bool:
    """Return whether `text` is HOST:PORT (an IPv6 address in brackets), port 1 to 65535.

    Each label of a name has 1 to 63 characters: sockets raise UnicodeError for others.
    """
    found = _ENDPOINT.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65536:
        return False
    return found[1].startswith("[") or all(0 < len(label) < 64 for label in found[1].removesuffix(".").split("."))


def endpoint_of(host: str, port: int | str) -> str:
    """Return HOST:PORT, an IPv6 address in brackets, whether it came in them or not."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host: a name or an address, an IPv6 one in brackets or not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(listen: str) -> str:
    """Return HOST:PORT where this machine itself reaches what listens at `listen`: loopback for what listens everywhere."""
    host, _, port = listen.rpartition(":")
    return f"{_EVERYWHERE.get(host, host)}:{port}"


def is_maddr(text: str) -> bool:
    """Return whether `text` is the multiaddress of a libp2p node, with its id: `/ip4/192.0.2.1/tcp/4001/p2p/12D3...`."""
    return _MADDR.fullmatch(text) is not None


def check_dht_peers(nodes: Sequence[str]) -> None:
    """Raise ConfigError unless these are multiaddresses of libp2p nodes, as `--dht-peers` takes them."""
    if wrong := next((each for each in nodes if not is_maddr(each)), None):
        raise ConfigError(f"--dht-peers {wrong!r:.200}: must be like /ip4/192.0.2.1/tcp/4001/p2p/12D3...")


def fingerprint(ca_der: bytes) -> str:
    """Return the SHA-256 of a certificate as people compare it: SHA256:AB:CD:..."""
    return "SHA256:" + hashlib.sha256(ca_der).digest().hex(":").upper()


def guest_key(token: str) -> ec.EllipticCurvePrivateKey:
    """Return the key of the certificate with which an invitation to a swarm is redeemed (P-256)."""
    wide = HKDF(hashes.SHA256(), 48, salt=None, info=b"edit-localsgd invitation").derive(token.encode())
    return ec.derive_private_key(1 + int.from_bytes(wide, "big") % (_P256_ORDER - 1), ec.SECP256R1())


@dataclass(frozen=True, slots=True)
class SwarmAccess:
    """How a guest reaches a swarm."""

    hosts: Mapping[str, tuple[str, ...]]  # HOST:PORT by peer_id; who invited comes first
    certificate: bytes  # DER, of `guest_key`


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What one machine needs to become one member, once."""

    identity: Identity
    token: str  # redeemable once
    enrol: tuple[str, ...]  # HOST:PORT where it is redeemed, tried in order
    ca: bytes  # DER of the only authority to trust
    expires: int  # unix seconds
    log_key: str = ""  # where the run keeps an audit log: its public key, as text
    swarm: SwarmAccess | None = None  # None: the run has a coordinator

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the run's authority, to compare over another channel."""
        return fingerprint(self.ca)

    def encode(self) -> str:
        """Return the text; one line."""
        values: dict[str, object] = {
            "v": VERSION,
            "run_id": self.identity.run_id,
            "peer_id": self.identity.peer_id,
            "role": self.identity.role,
            "token": self.token,
            "enrol": list(self.enrol),
            "ca": base64.b64encode(self.ca).decode(),
            "expires": self.expires,
        }
        if self.log_key:
            values["log"] = self.log_key
        if self.swarm is not None:
            values["hosts"] = {peer_id: list(addresses) for peer_id, addresses in self.swarm.hosts.items()}
            values["guest"] = base64.b64encode(self.swarm.certificate).decode()
        packed = json.dumps(values, separators=(",", ":")).encode()
        return f"edit{VERSION}.{base64.urlsafe_b64encode(packed).decode().rstrip('=')}"

    @classmethod
    def decode(cls, text: str, now: float | None = None) -> Invitation:
        """Read the text.

        Raises ConfigError when it is not an invitation, of another version, cut off or altered; RefusedError when it has
        expired at `now` (unix seconds; None: not checked).
        """
        invitation = _from_values(_values(text.strip()))
        if now is not None and now >= invitation.expires:
            ago = math.ceil((now - invitation.expires) / 60)
            raise RefusedError(
                f"the invitation expired {ago} minutes ago by this machine's clock; ask the run's operator for a new one"
            )
        return invitation


def _values(text: str) -> Mapping[str, Any]:
    found = _PREFIX.fullmatch(text) if len(text) <= MAX_TEXT_CHARS else None
    if found is None:
        raise ConfigError("this is not an invitation; one begins with edit1. and is printed by `edit-coordinator invite`")
    if int(found[1]) != VERSION:
        raise ConfigError(f"the invitation has version {found[1]}, this software reads version {VERSION}; update the older one")
    try:
        packed = base64.b64decode(found[2] + "=" * (-len(found[2]) % 4), altchars=b"-_", validate=True)
        values = parse_json(packed)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(_DAMAGED) from error
    if not isinstance(values, dict) or values.get("v") != VERSION:
        raise ConfigError(_DAMAGED)
    return values


def _from_values(values: Mapping[str, Any]) -> Invitation:
    enrol, expires, log = values.get("enrol"), values.get("expires"), values.get("log", "")
    if not isinstance(log, str) or len(log) > MAX_LOG_KEY_CHARS or not log.isprintable():
        raise ConfigError(_DAMAGED)
    words = [values.get(key) for key in ("run_id", "role", "peer_id", "token", "ca")]
    if not all(isinstance(word, str) for word in words) or type(expires) is not int or not 0 <= expires < 1 << 40:
        raise ConfigError(_DAMAGED)
    if not isinstance(enrol, list) or not 1 <= len(enrol) <= MAX_ENDPOINTS:
        raise ConfigError(_DAMAGED)
    run_id, role, peer_id, token, ca = (str(word) for word in words)
    if not all(isinstance(each, str) and is_endpoint(each) for each in enrol) or not TOKEN.fullmatch(token):
        raise ConfigError(_DAMAGED)
    try:
        ca_der = base64.b64decode(ca, validate=True)
        identity = Identity(run_id, role, peer_id)
    except (binascii.Error, ValueError, ConfigError) as error:
        raise ConfigError(_DAMAGED) from error
    if not 0 < len(ca_der) <= MAX_CA_BYTES:
        raise ConfigError(_DAMAGED)
    swarm = _swarm(values["hosts"], values.get("guest")) if "hosts" in values else None
    return Invitation(identity=identity, token=token, enrol=tuple(enrol), ca=ca_der, expires=expires, log_key=log, swarm=swarm)


def _swarm(hosts: object, guest: object) -> SwarmAccess:
    if not isinstance(hosts, dict) or not 1 <= len(hosts) <= MAX_ENDPOINTS or not isinstance(guest, str):
        raise ConfigError(_DAMAGED)
    for peer_id, addresses in hosts.items():
        if not is_id(peer_id) or not isinstance(addresses, list) or not 1 <= len(addresses) <= MAX_ENDPOINTS:
            raise ConfigError(_DAMAGED)
        if not all(isinstance(each, str) and is_endpoint(each) for each in addresses):
            raise ConfigError(_DAMAGED)
    try:
        certificate = base64.b64decode(guest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(_DAMAGED) from error
    if not 0 < len(certificate) <= MAX_CA_BYTES:
        raise ConfigError(_DAMAGED)
    return SwarmAccess({peer_id: tuple(addresses) for peer_id, addresses in hosts.items()}, certificate)
