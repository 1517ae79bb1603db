"""What a peer's connections have of its site: its key and folder, and what the site allows to leave."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from peers.carriers.hub.control_stream import Check
from peers.carriers.hub.kept_configuration import KeptConfiguration
from peers.carriers.hub.masking import MaskFolder

__all__ = ["NOWHERE", "Site"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One peer's."""

    # Its private key, in PEM, where the run's contributions are signed or masked; empty: it has none here.
    key: bytes = b""
    # What masked rounds need; None: it can take part in none.
    masks: MaskFolder | None = None
    # The peer's folder, where a run has an audit log: its receipts are checked and kept there; None: no receipt is asked for.
    receipts: Path | None = None
    # Of the run's configuration, as `ConfigParser`'s.
    check: Check = lambda text, config: None
    # The configuration that the peer takes part under, where changes of it need approvals; None: nothing is held to it.
    configuration: KeptConfiguration | None = None
    # The largest norm of a contribution, as `CompositeCollective`'s; 0: there is none.
    clip: float = 0.0
    # Fields of `Progress` that reports leave out.
    hide: Collection[str] = ()


NOWHERE = Site()  # without a key, and with no say
