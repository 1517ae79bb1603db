"""The members that this peer's operator knows: with whom a peer shares the keys of masked rounds, and with nobody else.

The run's operator enrols members, and could enrol some that it invented. Members send each other the line of their own
`edit-peer fingerprint` over another channel; a file of these lines is the --members of `edit-peer run`. Of a member that got a
new key the file has several: earlier ones are for what it has signed before, and keys are shared with the last one only.
"""

from __future__ import annotations

import re
from pathlib import Path

from edit.errors import ConfigError
from edit.plain_text import reason_of
from edit.trust.shamir import MOST_SHARES
from edit.trust.signatures import Signer, key_hash

__all__ = ["fingerprint", "read_members"]

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?:sha256:)?(?P<hash>[0-9a-f]{64})")


def fingerprint(peer_id: str, key: bytes) -> str:
    """Return the line by which others know this peer. key: its private key, in PEM."""
    return f"{peer_id} sha256:{key_hash(Signer(key).public_key)}"


def read_members(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the hashes of each member's public keys, by name, in the order of their lines: the last one is the present key.

    Empty lines and those that begin with # count for nothing.

    Raises ConfigError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--members {path}: cannot be read ({reason_of(error)})") from error
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"--members {path}: line {number} is not NAME sha256:HASH, as `edit-peer fingerprint` prints it")
        name, key = match["name"], match["hash"]
        found[name] = (*(each for each in found.get(name, ()) if each != key), key)
    if len(found) > MOST_SHARES:
        raise ConfigError(f"--members {path}: {len(found)} members; no masked round has more than {MOST_SHARES}")
    return found
