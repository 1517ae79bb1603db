"""A host that is started while the one before it still leaves, and when the run has finished."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from aggregator.storage.state_folder import lock_folder
from aggregator.swarm import operate, process
from edit.council.record import Phase
from edit.errors import ConfigError
from tests.aggregator.swarm.test_operating import ONES, equip, in_thread, scenario
from tests.support.council.hosts import Hosts


def test_beside_a_peer_a_host_waits_until_the_one_before_has_let_the_folder_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lock_folder(tmp_path, "another host has this folder")
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        os.close(before)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(process, "_is_beside_a_peer", lambda: False)
    with pytest.raises(ConfigError, match="another host has this folder"):
        asyncio.run(process._lock(tmp_path))
    assert not waits
    monkeypatch.setattr(process, "_is_beside_a_peer", lambda: True)
    asyncio.run(process._lock(tmp_path))
    assert len(waits) == 1
    with pytest.raises(ConfigError, match="taken"):
        lock_folder(tmp_path, "taken")


async def finish(swarm: Hosts) -> None:
    """Take two outer steps, and end the run there."""
    await swarm.contribute(0, ONES)
    await swarm.until(lambda: {*swarm.steps().values()} == {1}, passes=1.0)
    await in_thread(operate.drain, equip(swarm, "a", authority=True))
    await swarm.contribute(0, ONES)
    await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)
    await swarm.until(lambda: {*swarm.steps().values()} == {2}, passes=1.0)
    await swarm.until(lambda: all(host.council.record == swarm.record for host in swarm.running.values()), passes=1.0)


@pytest.mark.parametrize("beside_a_peer", [False, True])
def test_a_member_that_comes_back_when_all_others_have_ended_with_the_run_ends_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, beside_a_peer: bool
) -> None:
    """Nobody would lead: a quorum is not there, and a peer beside it could train with nobody."""

    async def body(swarm: Hosts) -> None:
        await finish(swarm)
        for peer_id in "abc":
            await swarm.stop(peer_id)
        host, stop, trained = await swarm.start("c"), asyncio.Event(), asyncio.Event()
        if not beside_a_peer:
            trained.set()
        with caplog.at_level(logging.INFO, process.__name__):
            ending = asyncio.ensure_future(process._end(host, stop, trained))
            await swarm.until(lambda: stop.is_set(), passes=5.0)
        await ending
        assert caplog.messages[-1] == "the run has finished: this member has all of it, and the others have ended"

    scenario(tmp_path, body)


def test_a_member_that_was_away_at_the_end_waits_and_takes_it_from_one_that_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def body(swarm: Hosts) -> None:
        await swarm.stop("c")
        await finish(swarm)
        for peer_id in "ab":
            await swarm.stop(peer_id)
        host, stop, trained = await swarm.start("c"), asyncio.Event(), asyncio.Event()
        trained.set()
        ending = asyncio.ensure_future(process._end(host, stop, trained))
        await swarm.until(lambda: "nobody leads" in caplog.text, passes=20.0)
        assert "not here: a, b; if the run has ended there, start one of them again" in caplog.text and not stop.is_set()
        await swarm.start("a")
        await swarm.until(lambda: stop.is_set(), passes=2.0)
        await ending
        assert swarm.steps() == {"a": 2, "c": 2} and swarm.same()

    scenario(tmp_path, body)
