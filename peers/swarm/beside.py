"""Other runs whose curves are drawn in the charts of one: `edit-peer report --beside`, `web --beside`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edit.errors import TransportError
from edit.plain_text import json_text
from edit.view.overlaid import HANDED_ON, read_beside
from editpb.run_status import RunStatus
from peers.identity.peer_folder import PeerFolder
from peers.swarm.aggregator_process import kept_status
from peers.watching import read_status

__all__ = ["handed_on", "runs_beside"]


def runs_beside(paths: Sequence[Path]) -> dict[str, RunStatus]:
    """Return how other runs stand, by the name that their lines have.

    paths: of each the folder of a member, of an observer, or of a coordinator. Raises ConfigError, TransportError, and what the
    run of a member answers.
    """
    return read_beside(paths, _told)


def handed_on(path: Path) -> Path | None:
    """Return an open file in which another program finds how the run of this folder stands; None: it can find that out itself.

    That file has no name, and goes with the last process that has it open. Raises as `runs_beside`.
    """
    if (folder := _of_hub(path)) is None:
        return None
    try:
        status = asyncio.run(read_status(folder))
    except TransportError as error:
        raise TransportError(f"--beside {path}: {error}") from error
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        file.write(json_text(status.as_json()))
        file.flush()
        file.seek(0)
        descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return HANDED_ON / str(descriptor)


def _told(path: Path) -> RunStatus:
    folder = _of_hub(path)
    return kept_status(path) if folder is None else asyncio.run(read_status(folder))


def _of_hub(path: Path) -> PeerFolder | None:
    """Return the folder of a member of a run with a coordinator; None for any other."""
    folder = PeerFolder(path)
    return folder if folder.identity() is not None and not folder.of_swarm() else None
