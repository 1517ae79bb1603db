"""How long the owner that settles waits for the others' outer parameters, which share its link."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aggregator.swarm.gossip.member import GossipMember
from edit.errors import BusyError, GoneError
from tests.support.loops import outside, pass_time, run_held

DEADLINE_S = 60.0


class Owner:
    """What `_gather` needs of a member whose peer is there, with a link that takes one second for all of one member."""

    gather = GossipMember._gather

    def __init__(self, alone_s: float, *silent: str) -> None:
        self.peer_id = self._peer_id = "owner"
        self._config = SimpleNamespace(gossip=SimpleNamespace(deadline_s=DEADLINE_S))
        self._alone_s, self._silent, self._reads = alone_s, silent, set[str]()
        self._drains = False

    def _record(self) -> Any:
        return SimpleNamespace(members={"owner", *"abcdefgh"})

    def _taken(self) -> int:
        return 5

    def _away(self, peer_id: str) -> bool:
        return False

    async def _do(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    def _without_far(self, number: int, got: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        return got

    async def _of(self, peer_id: str, number: int, uploads: object) -> list[Tensor]:
        if peer_id in self._silent:
            await asyncio.Event().wait()
        left, loop = 0.0 if peer_id == "owner" else self._alone_s, asyncio.get_running_loop()
        self._reads.add(peer_id)
        while left > 0:
            before = loop.time()
            await asyncio.sleep(0.1)
            left -= (loop.time() - before) / len(self._reads)
        self._reads.discard(peer_id)
        return [torch.zeros(1)]


def gathered(owner: Owner) -> tuple[list[str], float]:
    """Return whom it has gathered, and after how many seconds."""

    async def run() -> tuple[list[str], float]:
        gathering = asyncio.ensure_future(owner.gather(1, None))  # type: ignore[misc]
        while not gathering.done():
            await outside(0.0)
            pass_time(0.1)
        return sorted(await gathering), asyncio.get_running_loop().time()

    return run_held(run())


def test_transfers_that_come_together_are_given_longer() -> None:
    found, seconds = gathered(Owner(40.0))
    assert found == [*"abcdefgh", "owner"] and 300 < seconds < 8 * DEADLINE_S


def test_who_did_not_train_yet_when_it_was_asked_first_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """The owner asks from the beginning of the run on, when no peer is there yet; h has none later, either."""

    class Beginning(Owner):
        async def _of(self, peer_id: str, number: int, uploads: object) -> list[Tensor]:
            now = asyncio.get_running_loop().time() - self.begun
            if now < 5.0 or peer_id == "h":
                raise GoneError(f"{peer_id} does not train")
            if now < 10.0:
                raise BusyError(f"{peer_id} is not there yet")
            return await super()._of(peer_id, number, uploads)

        def _taken(self) -> int | None:  # type: ignore[override]
            now = asyncio.get_running_loop().time()
            self.begun = getattr(self, "begun", now)
            return None if now - self.begun < 5.0 else 5

        def _record(self) -> Any:
            self._taken()
            return super()._record()

    found, seconds = gathered(Beginning(2.0))
    assert found == [*"abcdefg", "owner"] and seconds < DEADLINE_S


def test_one_that_sends_nothing_is_given_no_more_than_its_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found, seconds = gathered(Owner(1.0, "h"))
    assert found == [*"abcdefg", "owner"] and seconds < 1.5 * DEADLINE_S
    assert "settling 1: h sends nothing, or too slowly" in caplog.text
