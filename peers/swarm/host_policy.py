"""Holds a host that does not train to the policy of its site, before it starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from edit.config.run import RunConfig
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy
from peers.swarm.aggregator_process import parameters_of

__all__ = ["check_host"]

_log = logging.getLogger("peers")


def check_host(home: Path, arguments: Sequence[str]) -> None:
    """Raise ConfigError unless the site allows a host in this folder under the run's settings, which are fetched if need be.

    A site without policy.toml that has consented to nothing has no say. arguments: the host's command line.
    """
    folder, path = PeerFolder(home), home / "run.toml"
    policy = SitePolicy.load(home, folder.load(swarm=True).identity, folder.key)
    if not policy.has_say:
        return
    parameters = parameters_of(home, arguments) if policy.limits.max_parameters or not path.exists() else 0
    config = RunConfig.from_toml(path)
    policy.check_host(config.to_json(), config)
    policy.check_parameters(parameters)
    if policy.digest:
        _log.info(
            "%s allows it; [protect] and [data] have no effect, and the run gets no consent: a host contributes nothing",
            home / "policy.toml",
        )
