"""What a member holds of the model, read from its folder; its host may run meanwhile, and writes it."""

from __future__ import annotations

from pathlib import Path

from aggregator.export import Committed
from aggregator.storage.store import read_outer
from aggregator.swarm.host import merging
from aggregator.swarm.host_folder import Settings, identity_of
from aggregator.swarm.member_folder import MemberFolder
from edit.errors import ConfigError

__all__ = ["committed"]


def committed(path: Path) -> Committed:
    """Return the last committed outer parameters of all parts that lie in a member's folder.

    With gossip they are those that all settled on last. Raises ConfigError, also when a part is not there yet, StorageError.
    """
    run_id, settings, folder = identity_of(path).run_id, Settings.load(path), MemberFolder(path)
    config = settings.config()
    outers = []
    for part, _ in enumerate(settings.schemas(config)):
        outer = read_outer(folder.part(part), merging(config), run_id)
        if outer is None:
            raise ConfigError(f"{path}: has not received part {part} of the model yet; let its host run until it has")
        outers.append(outer)
    gossips = config.outer.algorithm == "gossip"
    return Committed(run_id, config, tuple(outers), "settling" if gossips else "outer step")
