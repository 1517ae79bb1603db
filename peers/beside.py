"""Other runs whose curves are drawn in the charts of one: `edit-peer report --beside`, `web --beside`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from edit.view.overlaid import read_beside
from editpb.run_status import RunStatus
from peers.identity.peer_folder import PeerFolder
from peers.swarm.aggregator_process import kept_status
from peers.watching import read_status

__all__ = ["runs_beside"]


def runs_beside(paths: Sequence[Path]) -> dict[str, RunStatus]:
    """Return how other runs stand, by the name that their lines have.

    paths: of each the folder of a member, of an observer, or of a coordinator. Raises ConfigError, TransportError, and what the
    run of a member answers.
    """
    return read_beside(paths, _told)


def _told(path: Path) -> RunStatus:
    folder = PeerFolder(path)
    if folder.identity() is not None and not folder.of_swarm():
        return asyncio.run(read_status(folder))
    return kept_status(path)
