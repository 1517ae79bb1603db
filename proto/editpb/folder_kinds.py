"""Whose folder a folder is, so that no command writes into one of another kind."""

from __future__ import annotations

from pathlib import Path

from edit.errors import ConfigError

__all__ = ["kind_of_folder", "refuse_coordinators"]

_KINDS = (
    ("a coordinator", ("run.json", "ca.key")),
    ("a member of a swarm", ("council.json", "host.json", "authority")),
    ("a peer", ("identity.json", "peer.key")),
)


def kind_of_folder(path: Path) -> str:
    """Return whose folder this is, in words, by what lies in it; empty: nobody's. Raises ConfigError."""
    try:
        return next((kind for kind, names in _KINDS if any((path / name).exists() for name in names)), "")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def refuse_coordinators(home: Path) -> None:
    """Raise ConfigError where a peer's folder would be made in a coordinator's."""
    if kind_of_folder(home) == _KINDS[0][0]:
        raise ConfigError(f"{home}: is the folder of {_KINDS[0][0]}; choose another --home")
