"""One peer at two aggregators: neither waits for it before it is at both; what ends it and what it says goes to both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edit.config.run import RunConfig
from edit.errors import EvictedError
from edit.replica.ranks import ALONE
from editpb.identity import Identity
from editpb.messages import Expel, PeerState
from peers.carriers.hub.all_aggregators import AllAggregators
from peers.carriers.hub.channels import Channels
from peers.carriers.io_thread import IoThread
from tests.support.fake_coordinator import RUN_ID, FakeCoordinator
from tests.support.served import SCHEMA, theta

ME = Identity(RUN_ID, "peer", "a")
VALUES = {"name": "test", "membership": {"heartbeat_s": 0.1, "lease_s": 1.0}}


@pytest.fixture
def two() -> Iterator[tuple[FakeCoordinator, FakeCoordinator]]:
    with FakeCoordinator(RunConfig.from_mapping(VALUES), SCHEMA, theta()) as second:
        config = RunConfig.from_mapping({**VALUES, "aggregators": {"addresses": [f"127.0.0.1:{second.port}"]}})
        second.config = config
        with FakeCoordinator(config, SCHEMA, theta()) as first:
            yield first, second


def states(fake: FakeCoordinator) -> set[PeerState]:
    return {beat.state for beat in fake.heartbeats}


def test_no_aggregator_waits_for_a_peer_that_is_not_yet_at_all_of_them(two: tuple[FakeCoordinator, FakeCoordinator]) -> None:
    first = two[0]
    with IoThread() as io:
        collectives = AllAggregators(io, [Channels((f"127.0.0.1:{fake.port}",)) for fake in two], ME, ALONE)
        assert len(collectives.shares) == 2 and collectives.peer_id == "a"
        collectives.shares[0].join(SCHEMA, theta)
        seen = len(first.heartbeats)
        first.await_(lambda fake: len(fake.heartbeats) > seen + 2)
        assert states(first) == {PeerState.STARTING}
        collectives.shares[1].join(SCHEMA, theta)
        for fake in two:
            fake.await_(lambda fake: PeerState.TRAINING in states(fake))
        assert collectives.connected and not collectives.ended
        collectives.close("the test is over")
        for fake in two:
            fake.await_(lambda fake: fake.goodbyes == ["the test is over"])
    assert collectives.traffic.received == sum(one.traffic.received for one in collectives.shares) > 0


def test_an_eviction_by_one_aggregator_ends_the_peer(two: tuple[FakeCoordinator, FakeCoordinator]) -> None:
    _, second = two
    with IoThread() as io:
        collectives = AllAggregators(io, [Channels((f"127.0.0.1:{fake.port}",)) for fake in two], ME, ALONE)
        for collective in collectives.shares:
            collective.join(SCHEMA, theta)
        collectives.check()
        second.expel = Expel(True, "key lost")
        second.show()
        with pytest.raises(EvictedError, match="key lost"):
            io.wait(collectives.check, timeout=20)
        collectives.close()
