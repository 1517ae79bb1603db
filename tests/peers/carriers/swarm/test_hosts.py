"""Where a rank reaches the hosts."""

from __future__ import annotations

import pytest

from edit.errors import ConfigError
from editpb.council_messages import SwarmDescription
from peers.carriers.swarm.hosts import hosts_of

OTHERS = {"b": ("b.example.org:7700", "10.0.0.2:7700"), "c": ()}


@pytest.mark.parametrize(
    ("advertised", "own", "expected"),
    [
        (("a.example.org:7700",), "127.0.0.1:7700", "127.0.0.1:7700"),
        (("127.0.0.1:7700", "a.example.org:7700"), "", "a.example.org:7700"),
        ((), "127.0.0.1:7700", "127.0.0.1:7700"),
    ],
)
def test_own_host_comes_first_and_a_rank_elsewhere_reaches_it_as_others_do(
    advertised: tuple[str, ...], own: str, expected: str
) -> None:
    swarm = SwarmDescription(parts=1, hosts={**OTHERS, "a": advertised})
    assert list(hosts_of(swarm, "a", own).items()) == [("a", expected), ("b", "b.example.org:7700")]


@pytest.mark.parametrize("advertised", [(), ("127.0.0.1:7700",), ("localhost:7700", "[::1]:7700")])
def test_a_rank_on_a_machine_that_does_not_reach_the_own_host_says_what_to_do(advertised: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="start the member with --advertise HOST"):
        hosts_of(SwarmDescription(parts=1, hosts={**OTHERS, "a": advertised}), "a")
