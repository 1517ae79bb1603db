"""Other runs whose curves are drawn in the charts of one: the folder of a coordinator, or of a member of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aggregator import past
from aggregator.storage.state_folder import StateFolder
from aggregator.swarm import watching
from edit.errors import ConfigError
from edit.plain_text import parse_json, quoted
from edit.view.overlaid import HANDED_ON, read_beside
from editpb.run_status import DAMAGE, RunStatus

__all__ = ["kept_status", "runs_beside"]


def runs_beside(paths: Sequence[Path]) -> dict[str, RunStatus]:
    """Return how other runs stand, by the name that their lines have. Raises ConfigError, and as `whole_status` of each."""
    return read_beside(paths, kept_status)


def kept_status(path: Path) -> RunStatus:
    """Return how the run stands of a coordinator's folder, or of that of a member of a swarm, or as it was handed on.

    Raises likewise.
    """
    if path.parent == HANDED_ON:
        try:
            return RunStatus.from_json(parse_json(path.read_bytes()))
        except (OSError, *DAMAGE) as error:
            raise ConfigError(f"{path}: does not say how a run stands ({error})") from error
    if (path / "peer.pem").exists():
        if not (path / "run.toml").exists():
            raise ConfigError(
                f"{path}: is the folder of a member that has no settings yet, or of a run with a coordinator; compare that run "
                f"from there: edit-peer report --home {quoted(path)} --beside FOLDER"
            )
        return watching.whole_status(path)
    return past.whole_status(StateFolder(path))
