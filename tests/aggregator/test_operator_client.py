"""What the operator's commands refuse before they call anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator.operator_client import evict_peer
from aggregator.swarm import operate
from edit.errors import ConfigError


@pytest.mark.parametrize("name", ["", "a b", "../x", "universit\u00e9", "a" * 65])
def test_a_name_that_no_member_can_have_is_refused(tmp_path: Path, name: str) -> None:
    for order in (evict_peer, lambda *_: operate.share_authority(tmp_path, name)):
        with pytest.raises(ConfigError, match="must be 1 to 64 of A-Z a-z 0-9"):
            order(name, "key lost")


def test_a_reason_that_no_host_would_take_is_refused() -> None:
    evict_peer("a", "x" * 4096)
    with pytest.raises(ConfigError, match="the reason has 4097 characters, more than 4096"):
        evict_peer("a", "x" * 4097)
