"""The ranks of a peer read updates from their own host, so that the bytes come from the owner once; the bits are the same."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from aggregator.services import data as owner_module
from aggregator.swarm import taken_updates
from aggregator.swarm.host import Host
from aggregator.swarm.taken_updates import TakenUpdates
from edit.errors import EditError, GoneError, StaleError
from edit.fragments.digest import digest
from edit.records import Commit, Committed, Contribution
from edit.replica.ranks import Ranks
from editpb.identity import Identity
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm import waiting
from peers.carriers.swarm.connect import connect_swarm
from tests.support.council.trained import Trained, trained
from tests.support.encoded import encode
from tests.support.fake_run import vectors
from tests.support.loops import WAIT_S, pass_time, run_held
from tests.support.served import TOML
from tests.support.thread_ranks import at_every_rank
from tests.support.two_ranks import SCHEMA, SIZES, shards

STEPS = 3
UPDATE_BYTES = 4 * sum(SIZES)


class Bytes:
    """Counts the bytes of updates that ranks are sent: by the owner's engine, and by a peer's own host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = Counter[str]()
        for name, module in (("owner", owner_module), ("own host", taken_updates)):
            monkeypatch.setattr(module, "update_frames", self._counting(name, module.update_frames))

    def _counting(self, name: str, frames: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def counted(fragment_id: int, data: memoryview, *, start: int = 0, **named: Any) -> Iterator[bytes]:
            self.of[name] += len(data) - start
            return frames(fragment_id, data, start=start, **named)

        return counted


def train(at: Trained, name: str, ranks: Ranks) -> list[str]:
    """Take outer steps with deltas of their number; return the digests that they led to."""
    addresses = at.addresses()
    hosts = {name: addresses.pop(name), **addresses} if name in addresses else addresses
    identity = Identity(at.swarm.run_id, "peer", name)
    with IoThread() as io, connect_swarm(io, hosts, 1, at.credentials(name), identity, ranks) as (connection, _, _):
        (collective,) = connection.shares
        held = shards(ranks.rank)
        collective.join(SCHEMA, list, held)
        digests = []
        for step in range(STEPS):
            for i, (shard, delta) in enumerate(zip(held, vectors(SIZES, 1 + step), strict=True)):
                if shard.numel:
                    payload, boxes = encode("fp32", shard.take(delta)), None if shard.is_whole else shard.boxes
                    collective.contribute(
                        Contribution(outer_step=step, fragment_id=i, inner_steps=5, tokens=50, payload=payload, boxes=boxes)
                    )
            while (outcome := collective.outcome(step, block=True)) is None:
                pass
            assert isinstance(outcome, Committed), outcome
            digests.append(outcome.commit.digest)
        return digests


def expected() -> list[str]:
    theta, found = vectors(SIZES, 0), []
    for step in range(STEPS):
        theta = [part - delta for part, delta in zip(theta, vectors(SIZES, 1 + step), strict=True)]
        found.append(digest(theta))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["own host", "no host of its own", "own host is behind", "own host is slow"])
def test_two_ranks_read_an_update_from_their_own_host_where_that_has_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = TOML.format(start=1, quorum=1) + "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    with trained(tmp_path, monkeypatch, SCHEMA, vectors(SIZES, 0), toml) as at:
        at.until(lambda: at.swarm.owner() is not None)
        owner = at.swarm.record.parts[0].owner
        name = min({*"abc"} - {owner}) if case != "no host of its own" else "peer"
        asked = Counter[str]()
        if case == "own host is behind":

            async def gone(self: TakenUpdates, outer_step: int) -> None:
                asked["own host"] += 1
                raise GoneError("not here")

            monkeypatch.setattr(TakenUpdates, "_commit", gone)
        if case == "own host is slow":
            find, slow = TakenUpdates._commit, Counter[int]()

            async def still_coming(self: TakenUpdates, outer_step: int) -> Commit:
                slow[outer_step] += 1
                if slow[outer_step] <= 3:
                    raise StaleError("it is on its way here: ask again")
                return await find(self, outer_step)

            monkeypatch.setattr(TakenUpdates, "_commit", still_coming)
        counted = Bytes(monkeypatch).of
        at.credentials(name)  # all ranks have the same
        found = at_every_rank(2, lambda ranks: train(at, name, ranks))
        assert found == [expected()] * 2
        at.until(lambda: len(set(at.swarm.steps().values())) == 1)
        assert at.call(at_one_state(at))
    if case in ("own host", "own host is slow"):
        assert counted["owner"] == 0, "the ranks read nothing over the slow link"
        assert counted["own host"] == STEPS * UPDATE_BYTES, "each rank its shards"
    else:
        assert counted["own host"] == 0 and counted["owner"] >= STEPS * UPDATE_BYTES
        assert bool(asked) == (case == "own host is behind")
        assert asked["own host"] <= 2 * 2, "it is not asked again for a while"


@pytest.mark.parametrize(("comes", "said"), [(True, StaleError), (False, GoneError)])
def test_a_host_says_whether_an_update_that_it_lacks_is_on_its_way(comes: bool, said: type[EditError]) -> None:
    async def in_the_parts_thread(call: Callable[..., Any], *arguments: object) -> Any:
        raise AssertionError("there is nothing to read")

    async def body() -> None:
        asked = list[int]()

        def ask(outer_step: int) -> bool:
            asked.append(outer_step)
            return comes

        here = TakenUpdates(cast(Any, None), SCHEMA, lambda _: None, ask, in_the_parts_thread)
        waiting = asyncio.ensure_future(here._commit(5))
        await asyncio.sleep(0)
        pass_time(taken_updates.WAITS_S / 2)
        here.taken()  # another outer step
        await asyncio.sleep(0)
        assert not waiting.done() and not asked
        pass_time(taken_updates.WAITS_S)
        with pytest.raises(said, match="outer step 5"):
            await waiting
        assert asked == [5]

    run_held(body())


def test_a_peer_whose_owner_makes_nothing_says_so_to_its_own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = TOML.format(start=1, quorum=1) + "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    monkeypatch.setattr(waiting, "EACH_S", 0.01)
    with trained(tmp_path, monkeypatch, SCHEMA, vectors(SIZES, 0), toml) as at:
        at.until(lambda: at.swarm.owner() is not None)
        owner = at.swarm.record.parts[0].owner
        name = min({*"abc"} - {owner})
        withheld, told = threading.Event(), threading.Event()
        propose, wanted = Host._propose, Host.wanted

        async def withhold(self: Host, *arguments: Any) -> None:
            if self.peer_id == owner and not told.is_set():
                withheld.set()
                until = time.monotonic() + WAIT_S
                while not told.is_set() and time.monotonic() < until:
                    await asyncio.to_thread(time.sleep, 0.001)
            await propose(self, *arguments)

        def hear(self: Host, waiting: Mapping[int, int]) -> None:
            assert self.peer_id == name
            wanted(self, waiting)
            if withheld.is_set() and waiting == {0: 0}:
                told.set()

        monkeypatch.setattr(Host, "_propose", withhold)
        monkeypatch.setattr(Host, "wanted", hear)
        at.credentials(name)
        assert at_every_rank(2, lambda ranks: train(at, name, ranks)) == [expected()] * 2
        assert told.is_set(), "and not what has an outcome"


async def at_one_state(at: Trained) -> bool:
    return at.swarm.same()


def test_who_starts_with_an_old_address_of_the_owner_hears_the_new_one_from_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts that it reaches only name the owner, whose address they tell with the news of owners."""
    toml = TOML.format(start=1, quorum=1) + "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    with trained(tmp_path, monkeypatch, SCHEMA, vectors(SIZES, 0), toml) as at:
        at.until(lambda: at.swarm.owner() is not None)
        owner = at.swarm.record.parts[0].owner
        name = min({*"abc"} - {owner})
        addresses, known = at.addresses(), Trained.addresses
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            addresses[owner] = f"127.0.0.1:{nobody.getsockname()[1]}"
            monkeypatch.setattr(Trained, "addresses", lambda self: dict(addresses))
            at.credentials(name)
            assert at_every_rank(2, lambda ranks: train(at, name, ranks)) == [expected()] * 2
        assert known(at)[owner] != addresses[owner]
