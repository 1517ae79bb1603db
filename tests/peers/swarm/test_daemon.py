"""A member that trains: which settings it cannot train with."""

import pytest

from edit.config.run import RunConfig
from edit.errors import ConfigError
from peers.swarm.daemon import check_ranks


def test_a_member_of_several_ranks_is_refused_with_gossip() -> None:
    gossip = RunConfig.from_mapping({"outer": {"algorithm": "gossip"}})
    for config, size in ((gossip, 1), (RunConfig(), 2)):
        check_ranks(config, size)
    with pytest.raises(ConfigError, match=r"needs members of one rank each, and this one has 2"):
        check_ranks(gossip, 2)
