"""The settling that ends a drained run says so: the next owner settles no more, and who was away counts as the others do."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aggregator.storage.store import Store
from aggregator.swarm.gossip.member import GossipMember
from aggregator.swarm.gossip.phi import Calendar, Phi, PhiStore
from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import PartReplica
from edit.config.run import RunConfig
from edit.lab.council.parts_on_disk import RUN, outer_state
from edit.merging.gossip import settling


def settings(every: int) -> RunConfig:
    mapping = {
        "sync": {"outer_steps": 100},
        "outer": {"algorithm": "gossip"},
        "penalty": {"enabled": False},
        "gossip": {"settle_every": every},
        "storage": {"checkpoint_every": 1},
    }
    return RunConfig.from_mapping(mapping)


class Member:
    """What a settling, and a host that starts, need of a member in a folder whose own engine is at outer step 3."""

    settle, recovered = GossipMember.settle, GossipMember._recovered
    _merged, _drained = GossipMember._merged, GossipMember._drained

    def __init__(self, folder: Path, every: int, *, drains: bool) -> None:
        self._config, self._drains, self._peer_id = settings(every), drains, "a"
        self._store = Store(folder, settling(self._config), RUN)
        self._replica = PartReplica(RUN, 0, settling(self._config), self._store)
        if not self._replica.state.digest:
            self._replica.found(outer_state(settling(self._config), 0))
        self.calendar, self._phi, self._schema = Calendar.of(self._config), None, self._replica.outer.schema
        self.proposed = list[Offer]()
        self._settled_resting, self.agreed = False, 0

    def _settled(self) -> int:
        return max(self._replica.state.outer_step, self.agreed)

    async def _do(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    def _uploads_of_others(self) -> Any:
        return SimpleNamespace(close=lambda wait: None)

    async def _gather(self, number: int, uploads: object) -> dict[str, list[torch.Tensor]]:
        if number > 2:
            return {}  # enough was seen: of a run that does not end
        return {name: [part + i for part in self._replica.outer.theta] for i, name in enumerate("ab")}

    async def _further(self, *arguments: object, **named: object) -> None:
        """Nobody is ahead."""

    def settles(self, grant: int) -> int:
        """Settle as the owner, and let all agree; return how many settlings there are then."""

        def propose(offer: Offer, records: Any) -> None:
            self._replica.hold(offer, records)
            self._replica.adopt(offer.update.id)

        asyncio.run(self.settle(grant, propose, lambda: True))  # type: ignore[misc]
        return self._replica.state.outer_step

    def starts(self, swaps: int, settlings: int = 0) -> int:
        """Begin with a phi that has taken so many swaps and settlings; return at which outer step."""
        phi = Phi.begun("a", self._schema, self._config, settlings, self._replica.outer.theta)
        phi.state.begin_at(swaps, phi.theta, [0.0] * len(phi.theta))
        store = SimpleNamespace(recover=lambda: phi, replace=lambda phi: None, forget=lambda: None)
        found: Phi = asyncio.run(self.recovered(store))  # type: ignore[misc]
        return found.outer_step


@pytest.mark.parametrize("every", [0, 10])
def test_the_settling_of_a_drain_is_the_last_one_for_the_next_owner_and_after_a_start(tmp_path: Path, every: int) -> None:
    one = Member(tmp_path, every, drains=True)
    assert one.settles(1) == 1
    assert one.settles(2) == 1, "another owns the part before all know that the run has ended"
    one._store.close()
    again = Member(tmp_path, every, drains=True)
    assert again.settles(3) == 1
    assert again.starts(swaps=3) == 4
    again._store.close()


def test_who_missed_settlings_before_that_of_a_drain_counts_them(tmp_path: Path) -> None:
    one = Member(tmp_path, 10, drains=False)
    assert one.settles(1) == 2, "each is followed by another"
    assert one.starts(swaps=3) == 22
    one._store.close()
    phi = Phi.begun("a", one._schema, settings(10), 0, one._replica.outer.theta)
    phi.settle(3, phi.theta, early=True)
    assert phi.outer_step == 23


def test_what_has_settled_more_often_than_all_is_of_a_lost_lineage_and_is_not_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Member(tmp_path, 10, drains=False)
    assert one.starts(swaps=3) == 3 and not caplog.text
    assert one.starts(swaps=13, settlings=1) == 0, "at what all have: the first parameters"
    assert "has settled 1 times" in caplog.text
    one._store.close()


def test_where_part_0_has_yet_to_take_the_last_settling_again_a_member_goes_on_from_its_own_parameters(tmp_path: Path) -> None:
    one = Member(tmp_path, 10, drains=False)
    one.agreed = 1  # by the record, while the digest that part 0 wrote last was lost with the power
    assert one.starts(swaps=13, settlings=1) == 14
    one._store.close()


def test_nothing_of_a_lost_lineage_comes_back_at_a_later_settling(tmp_path: Path) -> None:
    one, folder = Member(tmp_path / "part", 10, drains=False), tmp_path / "phi"

    def begins() -> Phi:
        store = PhiStore(folder, one._config, RUN, lambda *_: Future())
        found: Phi = asyncio.run(one.recovered(store))  # type: ignore[misc]
        store.close()
        return found

    store = PhiStore(folder, one._config, RUN, lambda *_: Future())
    assert store.recover() is None
    lost = [part + 7 for part in one._replica.outer.theta]
    store.replace(Phi.begun("a", one._schema, one._config, 2, lost))
    store.close()
    assert begins().outer_step == 0
    assert one.settles(1) == 2
    phi = begins()
    assert phi.settlings == 2 and all(bool((a == b).all()) for a, b in zip(phi.theta, one._replica.outer.theta, strict=True))
    one._store.close()
