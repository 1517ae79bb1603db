"""Other runs whose curves are drawn in the charts of one: the folder of a coordinator, or of a member of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aggregator import past
from aggregator.storage.state_folder import StateFolder
from aggregator.swarm import watching
from edit.errors import ConfigError
from edit.view.overlaid import MOST_BESIDE
from editpb.run_status import RunStatus

__all__ = ["runs_beside"]


def runs_beside(paths: Sequence[Path]) -> dict[str, RunStatus]:
    """Return how other runs stand, by the name that their lines have. Raises ConfigError, and as `whole_status` of each."""
    if len(paths) > MOST_BESIDE:
        raise ConfigError(f"--beside: at most {MOST_BESIDE} runs can be told apart")
    found: dict[str, RunStatus] = {}
    for path in paths:
        status = _whole_status(path)
        same = sum(each.run_id == status.run_id for each in found.values())
        found[f"run {status.run_id}{f' ({same + 1})' if same else ''}"] = status
    return found


def _whole_status(path: Path) -> RunStatus:
    if (path / "peer.pem").exists():
        return watching.whole_status(path)
    return past.whole_status(StateFolder(path))
