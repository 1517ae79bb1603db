"""One peer at two aggregators: neither waits for it before it is at both; what ends it and what it says goes to both."""

from __future__ import annotations

import logging
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


def begin_anew(first: FakeCoordinator, addresses: list[str]) -> None:
    """Start the coordinator again, with these further aggregators."""
    first.stop()
    first.config = RunConfig.from_mapping({**VALUES, "aggregators": {"addresses": addresses}})
    first.start()


@pytest.mark.parametrize("away", [False, True])
def test_a_further_aggregator_is_followed_to_where_the_coordinator_says_that_it_is(
    two: tuple[FakeCoordinator, FakeCoordinator], away: bool
) -> None:
    first, second = two
    with FakeCoordinator(RunConfig.from_mapping(VALUES), SCHEMA, theta()) as moved, IoThread() as io:
        collectives = AllAggregators(io, [Channels((f"127.0.0.1:{fake.port}",)) for fake in two], ME, ALONE)
        for collective in collectives.shares:
            collective.join(SCHEMA, theta)
        if away:
            second.stop()
        begin_anew(first, [f"127.0.0.1:{moved.port}"])
        moved.config = first.config
        moved.await_(lambda fake: PeerState.TRAINING in states(fake))
        assert io.wait(lambda: collectives.connected or None, timeout=20)
        collectives.close("the test is over")
        for fake in (first, moved):
            fake.await_(lambda fake: fake.goodbyes == ["the test is over"])
        assert not second.goodbyes, "nothing goes on with the address that it had before"


def test_the_parts_of_a_swarm_are_no_aggregators_to_be_followed(
    two: tuple[FakeCoordinator, FakeCoordinator], caplog: pytest.LogCaptureFixture
) -> None:
    for fake in two:
        fake.config = RunConfig.from_mapping({**VALUES, "swarm": {"parts": 2}})
    with caplog.at_level(logging.WARNING), IoThread() as io:
        collectives = AllAggregators(io, [Channels((f"127.0.0.1:{fake.port}",)) for fake in two], ME, ALONE)
        for collective in collectives.shares:
            collective.join(SCHEMA, theta)
        collectives.close()
    assert not caplog.records


def test_another_number_of_aggregators_is_told_once(
    two: tuple[FakeCoordinator, FakeCoordinator], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two
    with caplog.at_level(logging.WARNING), IoThread() as io:
        collectives = AllAggregators(io, [Channels((f"127.0.0.1:{fake.port}",)) for fake in two], ME, ALONE)
        for collective in collectives.shares:
            collective.join(SCHEMA, theta)
        for _ in range(2):
            welcomes = len(first.hellos)
            begin_anew(first, [f"127.0.0.1:{second.port}", "127.0.0.1:9"])
            first.await_(lambda fake: len(fake.hellos) > welcomes and fake.heartbeats)  # noqa: B023
            assert io.wait(lambda: collectives.shares[0].connected or None, timeout=20)
        assert collectives.shares[1].connected
        collectives.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["the run has 3 aggregators now, this peer goes on with 2; start it again to take part with all"]
